"""The usual draft: `speculators train` with its own recipe on the same answers and states, for as long as ours took.

Told to it is what must be equal: verifier, data, layers and the draft's vocabulary; and the loss's slower form where
the default does not compile. Everything else is its default: optimizer, learning rates and their schedule, norms around
the projection, its share of validation.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.evaluation.report import POOLED
from eagle3_pipeline.stages import baseline as baseline_stage
from eagle3_pipeline.stages import draft_evaluation, verifier_outputs
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.current import current_chunks
from eagle3_pipeline.stages.draft_checkpoint import CONFIG, WEIGHTS
from eagle3_pipeline.stages.speeds import compare_batch_speeds
from eagle3_pipeline.stages.vocab_map import VOCAB_MAP_FILE
from eagle3_pipeline.store.fingerprint import digest, file_checksum, fingerprint, rows_content_id
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter
from eagle3_pipeline.store.shards import read_index, shard_name
from eagle3_pipeline.workers import log_tail
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_chain import FULL, USUAL, Quality
from eagle3_pipeline_tests.benchmarks.one_gpu.speculators_train import (
    OfflineData,
    loss_implementation,
    num_workers,
    run,
    told_lines,
)

_COMPLETE, _INTERRUPTED, _BEST = "complete", "interrupted", "checkpoint_best"
_START_TIMEOUT_S, _SAVE_TIMEOUT_S = 240.0, 30.0
_SAVED = "Interrupt checkpoint saved"
_PREFETCH = 2


def train_usual(
    quality: Quality, limit_s: float | None, epochs: int | None, workers: int, attention: str | None
) -> None:
    """Trains, and makes the result the checkpoint of the pipeline `usual`.

    Args:
        quality: our side, whose draft of all data is trained.
        limit_s: seconds from its first step; None: as long as ours took, its start included.
        epochs: of its schedule; None: as many as ours took.
        workers: data-loader processes.
        attention: an implementation other than its default.

    Raises:
        TrainingError: ours is not trained yet, or the command left no checkpoint.
    """
    ours = quality.context(FULL).last_manifest(ids.DRAFT_CHECKPOINT)
    if ours is None and not (limit_s and epochs):
        raise TrainingError(f"train the draft {FULL} first: how long it takes is the limit")
    limit_s = limit_s or (ours.wall_s if ours else 0.0)
    epochs = epochs or int(ours.metrics["epochs"] if ours else 1)
    context = quality.inputs(USUAL)
    folder = quality.home / "usual"
    started = time.monotonic()
    write_offline_data(context, folder / "data")
    quality.log(f"the data of speculators is there after {time.monotonic() - started:.1f} s")
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    arguments = _arguments(quality, context, folder, epochs, workers)
    arguments += ["--draft-attn-impl", attention] if attention else []
    holder, timeout = "speculators train", context.spec.resources.lease_timeout_s
    with context.engines.lease(1, holder, timeout, quality.log, context.verifier.content_id) as lease:
        found = _train(arguments, folder, limit_s, lease.environment(), not quality.num_gpus, quality.log)
    chosen, note = _choose_checkpoint(folder / "checkpoints")
    quality.write_note(USUAL, {"limit_s": limit_s, "epochs_of_schedule": epochs, **found, **note})
    quality.log(f"{found}; {note}")
    _adopt(context, chosen, found)


def write_offline_data(context: StageContext, folder: Path) -> None:
    """The current chunks as speculators reads them: a file of states a sequence, of its tokens but the last.

    (Our shards hold no states of the last token, which is nobody's input.)
    """
    if (folder / _COMPLETE).exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    data = OfflineData(folder)
    for row, states in _sequences(context):
        tokens, mask = (np.asarray(row[name][:-1], dtype=np.int64) for name in ("input_ids", "loss_mask"))
        data.add(tokens, mask, states)
    data.finish(context.upstream(ids.VOCAB_MAP).path(VOCAB_MAP_FILE), context.spec.vocab.draft_vocab_size)
    (folder / _COMPLETE).touch()


def _sequences(context: StageContext) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    chunks = current_chunks(context)
    for key, made in chunks.generations.items():
        folder = chunks.hidden_states[key].folder
        places = {row["sequence_id"]: row for row in read_index(folder).to_pylist()}
        columns = ["sequence_id", "input_ids", "loss_mask"]
        with contextlib.ExitStack() as stack:
            files = {
                number: stack.enter_context(safe_open(folder / shard_name(number), framework="pt"))
                for number in {place["shard"] for place in places.values()}
            }
            for row in pq.read_table(made.path(verifier_outputs.SEQUENCES), columns=columns).to_pylist():
                place = places[row["sequence_id"]]
                states = files[place["shard"]].get_slice("hidden_states")
                start = place["row_start"]
                yield row, states[start : start + place["num_tokens"]].clone()


def _arguments(quality: Quality, context: StageContext, folder: Path, epochs: int, workers: int) -> list[str]:
    layers = context.verifier.geometry(context.spec.capture).layer_ids[:-1]
    batch_bytes = 8192 * (len(layers) + 1) * context.verifier.hidden_size * 2
    given: dict[str, object] = {
        "verifier-name-or-path": context.verifier.path,
        "speculator-type": "eagle3",
        "data-path": folder / "data",
        "save-path": folder / "checkpoints",
        "log-dir": folder / "logs",
        "draft-vocab-size": context.spec.vocab.draft_vocab_size,
        "epochs": epochs,
        "num-workers": num_workers(_PREFETCH * batch_bytes, workers),
        "loss-implementation": loss_implementation(),
        "prefetch-factor": _PREFETCH,
        "on-missing": "raise",
        "mask-token-id": 0,
        # Its window is wider than any sequence here: the same numbers, without a mixture of caches in vLLM.
        "full-attention-indices": 0,
        # It waits for the device at every line of progress.
        "log-freq": 10,
    }
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return [*flags, "--target-layer-ids", *map(str, layers)]


def _train(
    arguments: list[str], folder: Path, limit_s: float, environment: dict[str, str], on_cpu: bool, log: Any
) -> dict[str, float]:
    """Runs the command, and interrupts it `limit_s` after its first step; what was seen of it."""
    started, first, last_step = time.monotonic(), 0.0, 0
    path = folder / "train.log"
    with run(arguments, path, on_cpu, environment) as process:
        watches = [_later(_START_TIMEOUT_S + limit_s, process, signal.SIGINT)]
        try:
            for line in told_lines(process, path):
                if found := re.search(r"global_step=(\d+)", line):
                    last_step = int(found.group(1))
                    if not first:
                        first = time.monotonic()
                        log(f"speculators takes its first step after {first - started:.1f} s")
                        watches.append(_later(limit_s, process, signal.SIGINT))
                        watches.append(_later(limit_s + _SAVE_TIMEOUT_S, process, signal.SIGKILL))
                if _SAVED in line:
                    break
            else:
                process.wait(_SAVE_TIMEOUT_S)
        finally:
            for watch in watches:
                watch.cancel()
    if not first:
        raise TrainingError(f"speculators train took no step:\n{log_tail(path)}")
    # After the interruption it only saves, and sometimes waits for its data-loader processes until it is killed.
    trained_s = min(time.monotonic() - first, limit_s)
    return {"start_s": first - started, "trained_s": trained_s, "last_logged_step": float(last_step)}


def _later(seconds: float, process: subprocess.Popen, number: signal.Signals) -> threading.Timer:
    """Kills the process and its data-loader processes, or sends another signal to the process alone."""
    send = os.killpg if number == signal.SIGKILL else os.kill
    timer = threading.Timer(seconds, send, [process.pid, number])
    timer.daemon = True
    timer.start()
    return timer


def _choose_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Of an unfinished schedule the newest weights, else those of the lowest validation loss, and what is known of it.

    The rate falls all along: what was interrupted late is better than the end of an earlier epoch.
    """
    complete = [path for path in folder.glob("*") if _is_complete(path)]
    numbered = sorted(int(path.name) for path in complete if path.name.isdigit())
    note: dict[str, Any] = {"epochs_saved": len(numbered), "interrupted": (folder / _INTERRUPTED).exists()}
    losses = {n: json.loads(p.read_text()) for n in numbered if (p := folder / str(n) / "val_metrics.json").exists()}
    note["validation"] = {str(n): found for n, found in losses.items()}
    for name in (_INTERRUPTED, _BEST, *([str(numbered[-1])] if numbered else [])):
        if (folder / name) in complete:
            return folder / name, {**note, "checkpoint": name}
    raise TrainingError(f"speculators train left no complete checkpoint in {folder}")


def _is_complete(path: Path) -> bool:
    """Whether the weights can be read to their end."""
    with contextlib.suppress(Exception), safe_open(path / WEIGHTS, framework="pt") as file:
        return (path / CONFIG).exists() and bool(list(file.keys()))
    return False


def _adopt(context: StageContext, folder: Path, found: dict[str, float]) -> None:
    """Publishes a foreign checkpoint as the pipeline's own."""
    inputs = {"weights": file_checksum(folder / WEIGHTS), "config": file_checksum(folder / CONFIG)}
    part = {"recipe": "speculators train"}
    identity = Identity(ids.DRAFT_CHECKPOINT, 1, part, inputs, fingerprint(ids.DRAFT_CHECKPOINT, 1, part, inputs))

    def produce(writer: ArtifactWriter) -> Produced:
        shutil.copyfile(folder / WEIGHTS, writer.folder / WEIGHTS)
        config = json.loads((folder / CONFIG).read_text())
        config.pop("auto_map", None)
        # vLLM 0.24 looks for these among the layer's settings only, and would serve another draft without them.
        layer = config["transformer_layer_config"]
        layer |= {key: config[key] for key in ("norm_output", "fc_norm") if key in config}
        (writer.folder / CONFIG).write_text(json.dumps(config, indent=2))
        return Produced(digest([inputs, config]), found)

    context.materialise(identity, None, produce)


def evaluate_served(context: StageContext) -> StageResult:
    """What `materialise_evaluation` does, without the teacher-forced pass, which knows this project's drafts only."""
    checkpoint, baseline = context.upstream(ids.DRAFT_CHECKPOINT), context.upstream(ids.BASELINE)
    identity = ids.evaluation_identity(context.spec, checkpoint.manifest.content_id, baseline.manifest.content_id)
    return context.materialise(identity, None, lambda writer: _serve(context, identity, checkpoint, baseline, writer))


def _serve(
    context: StageContext, identity: Identity, checkpoint: Artifact, baseline: Artifact, writer: ArtifactWriter
) -> Produced:
    sequences = pq.read_table(baseline.path(baseline_stage.SEQUENCES)).to_pylist()
    prompts = baseline_stage.asked(sequences)
    served, started = draft_evaluation._serve(context, identity, checkpoint, writer.folder, prompts)
    expected = {row["sequence_id"]: row for row in sequences}
    speeds = {r["category"]: r for r in pq.read_table(baseline.path(baseline_stage.SPEEDS)).to_pylist()}
    engine, rows, notes = draft_evaluation._engine(context, checkpoint), [], list[str]()
    for part in served:
        counts = draft_evaluation._compare(context, engine, identity, part, expected, notes)
        rows.append(draft_evaluation._row(part, speeds[part.category], *counts))
    rows.append(draft_evaluation._pooled_row(rows, served, list(speeds.values())))
    pooled = next(row for row in rows if row["category"] == POOLED)
    names = ("acceptance_length", "tokens_per_s", "baseline_tokens_per_s", "speed_up", "num_differences")
    metrics = {name: float(pooled[name]) for name in names} | {"num_engine_starts": float(started)}
    for row in compare_batch_speeds(writer.folder, baseline):
        metrics |= {f"{name}_batch_{row['batch_size']:.0f}": row[name] for name in ("tokens_per_s", "speed_up")}
    table = pa.Table.from_pylist(rows, draft_evaluation.EVALUATION_SCHEMA)
    pq.write_table(table, writer.folder / draft_evaluation.EVALUATION)
    return Produced(rows_content_id(draft_evaluation.CONTENT_COLUMNS, rows), metrics)
