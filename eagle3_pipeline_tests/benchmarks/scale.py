"""Ten thousand chunks and five thousand files: the plan, and a tick of the sensor of new chunks."""

import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg

from eagle3_pipeline.assets.sensors import build_new_chunks
from eagle3_pipeline.config import load_pipeline
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Produced, StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

NUM_CHUNKS = int(os.environ.get("EAGLE3_BENCH_CHUNKS", "10000"))
NUM_FILES = int(os.environ.get("EAGLE3_BENCH_FILES", "5000"))


def run() -> dict[str, Any]:
    """Seconds and memory."""
    with tempfile.TemporaryDirectory() as temporary, _without_fsync():
        folder = Path(temporary)
        make_tiny_llama(folder / "model")
        return {**_plan(folder), **_tick(folder)}


@contextmanager
def _without_fsync() -> Iterator[None]:
    """Only what prepares the measurement would wait for the disk."""
    real, os.fsync = os.fsync, lambda fd: None
    try:
        yield
    finally:
        os.fsync = real


def _context(folder: Path, name: str, rows_per_chunk: int) -> StageContext:
    os.environ["EAGLE3_HOME"] = str(folder)
    (folder / f"{name}.yaml").write_text(
        f"verifier: {{model: {folder}/model}}\n"
        f"dataset: {{path: {folder}/{name}/*.jsonl, samples_per_chunk: {rows_per_chunk}}}\n"
        "generation: {max_new_tokens: 16, max_sequence_tokens: 64}\n"
        "training: {batch_tokens: 64}\n"
    )
    return StageContext(load_pipeline(folder / f"{name}.yaml"), log=lambda _line: None, home=folder)


def _write(path: Path, start: int, num_rows: int) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"prompt": f"question {start + i}"}) + "\n" for i in range(num_rows)))
    os.utime(path, (time.time() - 3600, time.time() - 3600))


def _plan(folder: Path) -> dict[str, Any]:
    context = _context(folder, "many", 2)
    _write(folder / "many" / "rows.jsonl", 0, 2 * NUM_CHUNKS)
    context.registry.sync(context.spec)
    for key in context.all_chunks():
        _materialise(context, key)
    # One in a hundred is stale.
    for key in context.all_chunks()[::100]:
        (context.references.folder / ids.HIDDEN_STATES / f"{key}.json").unlink()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    found = plan(context)
    seconds = time.monotonic() - started
    table = time.monotonic()
    found.table()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        f"plan of {NUM_CHUNKS} chunks, {len(found.rows)} lines (s)": seconds,
        "its table (s)": time.monotonic() - table,
        "peak memory of the process (MiB)": peak / 1024,
        "of it by the plan (MiB)": (peak - before) / 1024,
    }


def _materialise(context: StageContext, key: str) -> None:
    """All three stages; what the verifier would make is ten bytes."""

    def produce(writer: Any) -> Produced:
        (writer.folder / "data.bin").write_bytes(b"0123456789")
        parts = {name: digest([name, key]) for name in ("input_ids", "token_counts")}
        return Produced(digest([key]), {"num_tokens": 100.0, "num_sequences": 2.0}, content_ids=parts)

    content = materialise_dataset(context, key).manifest.content_id
    identity = ids.generations_identity(context.spec, context.verifier, content)
    made = context.materialise(identity, key, produce)
    states = ids.hidden_states_identity(context.spec, context.verifier, made.manifest.content_ids["input_ids"])
    context.materialise(states, key, produce)


def _tick(folder: Path) -> dict[str, Any]:
    context = _context(folder, "files", 10)
    for number in range(NUM_FILES):
        _write(folder / "files" / f"{number:05d}.jsonl", 3 * number, 3)
    found: dict[str, Any] = {}
    with dg.DagsterInstance.ephemeral() as instance:
        sensor = build_new_chunks(context.spec)
        started, ticks = time.monotonic(), 0
        while True:
            before = time.monotonic()
            result = _evaluate(sensor, instance)
            if not result.asset_events:
                found[f"a tick over {NUM_FILES} known files (s)"] = time.monotonic() - before
                break
            ticks += 1
            found["a tick that adds chunks, longest (s)"] = max(
                time.monotonic() - before, found.get("a tick that adds chunks, longest (s)", 0.0)
            )
        found[f"ticks until {NUM_FILES} files are chunks"] = ticks
        found["seconds of them"] = time.monotonic() - started
        _write(folder / "files" / "00007.jsonl", 10**6, 3)
        before = time.monotonic()
        changed = _evaluate(sensor, instance)
        found["a tick with one changed file (s)"] = time.monotonic() - before
        found["chunks that it shows as changed"] = len(changed.asset_events)
    return found


def _evaluate(sensor: dg.SensorDefinition, instance: dg.DagsterInstance) -> dg.SensorResult:
    """A tick, and what the daemon does with its result."""
    result = sensor(dg.build_sensor_context(instance=instance))
    assert isinstance(result, dg.SensorResult)
    for request in result.dynamic_partitions_requests or ():
        assert isinstance(request, dg.AddDynamicPartitionsRequest)
        instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    return result
