"""The verifier's outputs of a chunk: `synthetic_generations` and `hidden_states`, in one pass where that is right.

Missing both, the engine captures the states while it generates. Missing the states only, it prefills the stored
sequences. Missing neither, nothing is started.
"""

import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.data.chat_template import ChatTemplate, load_tokenizer
from eagle3_pipeline.data.sequences import (
    CONTENT_COLUMNS,
    REJECTED_SCHEMA,
    SEQUENCE_SCHEMA,
    TOKEN_COUNT_SCHEMA,
    Prompt,
    RejectedTurn,
    Sequence,
    count_supervised,
    make_prompts,
    passthrough_sequences,
    sequence_from_answer,
)
from eagle3_pipeline.engine.jobs import GenerateJob, read_journal
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import CaptureError, DataError
from eagle3_pipeline.stages import dataset as dataset_stage
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.fidelity import check_states
from eagle3_pipeline.stages.progress import ProgressLog
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.fingerprint import digest, rows_content_id, token_lists_id
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter
from eagle3_pipeline.store.shards import INDEX_NAME, LAYER_CONVENTION, intact_records, read_index, seal_shards

SEQUENCES = "sequences.parquet"
TOKEN_COUNTS = "token_counts.parquet"
REJECTED = "rejected.parquet"
_CAPTURE = "capture"
_JOURNAL = "journal.jsonl"
_PROMPTS = "prompts.parquet"


@dataclass(frozen=True)
class ChunkOutputs:
    """Results of one chunk; `None` for what was not asked for."""

    generations: StageResult | None
    hidden_states: StageResult | None


def materialise_outputs(
    context: StageContext, chunk: str, generations: bool = True, hidden_states: bool = True
) -> ChunkOutputs:
    """Materialises what is asked for of one chunk.

    Args:
        context: the pipeline.
        chunk: the chunk's key.
        generations: whether `synthetic_generations` is wanted.
        hidden_states: whether `hidden_states` is wanted.

    Raises:
        DataError: too few turns give a sequence.
        EngineError, CaptureError, DiskSpaceError: as the engine met them.
    """
    made = states = None
    captured: Path | None = None
    if generations:
        upstream = context.upstream(ids.DATASET, chunk)
        identity = ids.generations_identity(context.spec, context.verifier, upstream.manifest.content_id)
        one_pass = hidden_states and _one_pass(context)
        captured = context.scratch(identity) / _CAPTURE if one_pass else None
        made = context.materialise(
            identity, chunk, lambda writer: _generate(context, chunk, upstream, identity, writer, captured)
        )
    if hidden_states:
        sequences = made.artifact if made else context.upstream(ids.SYNTHETIC_GENERATIONS, chunk)
        states = _materialise_states(context, chunk, sequences, captured)
    return ChunkOutputs(made, states)


def chat_template(context: StageContext) -> ChatTemplate:
    """The verifier's template with this pipeline's settings."""
    spec = context.spec
    tokenizer = load_tokenizer(context.verifier.path, spec.verifier.trust_remote_code)
    kwargs, stop_tokens = spec.generation.chat_template_kwargs, spec.verifier.stop_tokens
    return ChatTemplate(tokenizer, spec.verifier.chat_template, kwargs, stop_tokens)


def _one_pass(context: StageContext) -> bool:
    """Whether to capture while generating: vLLM on CPU samples garbage from a capturing engine, greedy is right."""
    generation = context.spec.generation
    if generation.mode == "passthrough" or generation.one_pass == "never":
        return False
    return generation.one_pass == "always" or generation.temperature == 0 or context.engines.num_gpus > 0


def _generate(
    context: StageContext,
    chunk: str,
    dataset: Artifact,
    identity: Identity,
    writer: ArtifactWriter,
    captured: Path | None,
) -> Produced:
    template = chat_template(context)
    spec = context.spec.generation
    conversations = pq.read_table(dataset.path(dataset_stage.CONVERSATIONS)).to_pylist()
    if spec.mode == "passthrough":
        items = [
            item
            for row in conversations
            for item in passthrough_sequences(row["conversation_id"], row["messages"], template, spec)
        ]
        sequences, rejected, speed = _split(items), [i for i in items if isinstance(i, RejectedTurn)], {}
    else:
        sequences, rejected, speed = _regenerate(context, chunk, conversations, template, identity, captured)
    return _write_sequences(context, chunk, writer, sequences, rejected, speed)


def _split(items: list[Any]) -> list[Sequence]:
    return [item for item in items if isinstance(item, Sequence)]


def _regenerate(
    context: StageContext,
    chunk: str,
    conversations: list[dict[str, Any]],
    template: ChatTemplate,
    identity: Identity,
    captured: Path | None,
) -> tuple[list[Sequence], list[RejectedTurn], dict[str, float]]:
    spec = context.spec.generation
    items = [
        item for row in conversations for item in make_prompts(row["conversation_id"], row["messages"], template, spec)
    ]
    prompts = [item for item in items if isinstance(item, Prompt)]
    rejected = [item for item in items if isinstance(item, RejectedTurn)]
    folder = context.scratch(identity)
    if captured:
        context.require_capture_space(captured, sum(len(p.input_ids) + spec.max_new_tokens for p in prompts))
    sampling = {
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "max_tokens": spec.max_new_tokens,
        "stop_token_ids": template.stop_token_ids,
    }
    engine = context.capturing_engine_spec() if captured else context.engine_spec()
    rows = [{"sequence_id": p.sequence_id, "input_ids": p.input_ids} for p in prompts]
    answers, speed = run_prompts(context, engine, folder, rows, sampling, f"generating chunk {chunk}", captured, True)
    outcomes = [sequence_from_answer(p, answers[p.sequence_id], template, spec) for p in prompts]
    rejected += [outcome for outcome in outcomes if isinstance(outcome, RejectedTurn)]
    return _split(outcomes), rejected, speed


def run_prompts(
    context: StageContext,
    engine: EngineSpec,
    folder: Path,
    rows: list[dict[str, Any]],
    sampling: dict[str, Any],
    what: str,
    captured: Path | None = None,
    include_output: bool = False,
    batch_size: int = 0,
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Sends a chunk of prompts to an engine and returns its answers by sequence id, and its speed.

    Args:
        context: the pipeline.
        engine: which engine.
        folder: scratch folder that holds the prompts and the journal; a rerun continues from it.
        rows: sequence_id and input_ids.
        sampling: sampling parameters.
        what: names the work in the log.
        captured: shard folder, if states are captured.
        include_output: capture sampled tokens too.
        batch_size: most requests in flight; 0: as many as the engine takes.
    """
    schema = pa.schema([("sequence_id", pa.string()), ("input_ids", pa.list_(pa.int32()))])
    prompts, journal = folder / _PROMPTS, folder / _JOURNAL
    pq.write_table(pa.Table.from_pylist(rows, schema), prompts)
    job = GenerateJob(
        str(prompts), str(journal), sampling, str(captured) if captured else "", include_output, batch_size
    )
    with context.engines.acquire(engine, context.log) as client:
        counts = client.generate(job, ProgressLog(context.log, what))
    elapsed = max(counts["elapsed_s"], 1e-9)
    tokens = counts["prompt_tokens"] + counts["new_tokens"]
    speed = {
        "engine_s": counts["elapsed_s"],
        "tokens_per_s": tokens / elapsed,
        "new_tokens_per_s": counts["new_tokens"] / elapsed,
        "num_reused_rows": counts["reused"],
    }
    return read_journal(journal), speed


def _write_sequences(
    context: StageContext,
    chunk: str,
    writer: ArtifactWriter,
    sequences: list[Sequence],
    rejected: list[RejectedTurn],
    speed: dict[str, float],
) -> Produced:
    reasons = Counter(turn.rejection.reason for turn in rejected)
    num_turns = len(sequences) + len(rejected)
    needed = max(1, context.spec.generation.min_yield * num_turns)
    if len(sequences) < needed:
        raise DataError(
            f"{context.spec.name}: chunk {chunk}: {len(sequences)} of {num_turns} turns give a training sequence, "
            f"generation.min_yield asks for {context.spec.generation.min_yield:.0%}; rejected: {dict(reasons)}"
        )
    rows = [asdict(sequence) for sequence in sequences]
    counts = sorted(count_supervised(sequences).items())
    pq.write_table(pa.Table.from_pylist(rows, SEQUENCE_SCHEMA), writer.folder / SEQUENCES)
    pq.write_table(pa.Table.from_pylist([r.row() for r in rejected], REJECTED_SCHEMA), writer.folder / REJECTED)
    table = pa.Table.from_pylist([{"token_id": t, "count": c} for t, c in counts], TOKEN_COUNT_SCHEMA)
    pq.write_table(table, writer.folder / TOKEN_COUNTS)
    supervised = sum(count for _, count in counts)
    metrics = {
        "num_sequences": len(sequences),
        "num_rejected": len(rejected),
        "num_tokens": sum(len(s.input_ids) for s in sequences),
        "num_supervised_tokens": supervised,
        "num_truncated": sum(s.finish_reason == "length" for s in sequences),
        **speed,
    }
    ordered = [[s.sequence_id, token_lists_id([s.input_ids])] for s in sequences]
    content_ids = {"input_ids": digest(ordered), "token_counts": digest(counts)}
    return Produced(rows_content_id(CONTENT_COLUMNS, rows), metrics, dict(reasons), content_ids)


def _materialise_states(context: StageContext, chunk: str, sequences: Artifact, captured: Path | None) -> StageResult:
    content = sequences.manifest.content_ids["input_ids"]
    identity = ids.hidden_states_identity(context.spec, context.verifier, content)
    result = context.materialise(
        identity, chunk, lambda writer: _capture(context, chunk, sequences, identity, writer, captured)
    )
    if captured:
        # Prompts, journal and any left-over shards of the pass whose results are published now.
        shutil.rmtree(captured.parent, ignore_errors=True)
    return result


def _capture(
    context: StageContext,
    chunk: str,
    sequences: Artifact,
    identity: Identity,
    writer: ArtifactWriter,
    captured: Path | None,
) -> Produced:
    """Takes the shards of the generating pass if they are complete, else prefills the stored sequences."""
    columns = ["sequence_id", "input_ids"]
    rows = pq.read_table(sequences.path(SEQUENCES), columns=columns).to_pylist()
    tokens = {row["sequence_id"]: np.asarray(row["input_ids"][:-1], dtype=np.int32) for row in rows}
    geometry = context.verifier.geometry(context.spec.capture)
    records = intact_records(captured, geometry) if captured else {}
    complete = all(i in records and records[i].num_tokens == len(ids_) for i, ids_ in tokens.items())
    speed: dict[str, float] = {}
    if captured and complete:
        for path in captured.iterdir():
            shutil.move(path, writer.folder / path.name)
    else:
        context.require_capture_space(writer.folder, sum(map(len, tokens.values())))
        speed = _prefill(context, chunk, tokens, identity, writer.folder)
        records = intact_records(writer.folder, geometry)
    kept = [records[i] for i in tokens if i in records]
    if len(kept) < len(tokens):
        missing = next(i for i in tokens if i not in records)
        raise CaptureError(
            f"{len(tokens) - len(kept)} of {len(tokens)} sequences of chunk {chunk} have no intact states, first: {missing}"
        )
    metadata = {
        "verifier": context.verifier.content_id,
        "layer_ids": list(geometry.layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "fingerprint": identity.fingerprint,
    }
    seal_shards(writer.folder, kept, tokens, geometry, metadata)
    statistics = check_states(
        writer.folder, read_index(writer.folder), tokens, geometry, context.spec.capture.min_layer_variance, chunk
    )
    num_bytes = sum(path.stat().st_size for path in writer.folder.iterdir() if path.name != INDEX_NAME)
    metrics = {
        "num_sequences": len(tokens),
        "num_tokens": sum(map(len, tokens.values())),
        "hidden_states_bytes": num_bytes,
        "one_pass": float(bool(captured and complete)),
        **statistics,
        **speed,
    }
    return Produced(identity.fingerprint, metrics)


def _prefill(
    context: StageContext, chunk: str, tokens: dict[str, np.ndarray], identity: Identity, folder: Path
) -> dict[str, float]:
    scratch = context.scratch(identity)
    rows = [{"sequence_id": i, "input_ids": ids_.tolist()} for i, ids_ in tokens.items()]
    sampling = {"temperature": 0.0, "max_tokens": 1}
    engine = context.capturing_engine_spec()
    _, speed = run_prompts(context, engine, scratch, rows, sampling, f"capturing chunk {chunk}", folder)
    shutil.rmtree(scratch, ignore_errors=True)
    return speed
