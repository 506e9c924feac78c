"""Prefills of stored sequences: what one engine is asked for, what it wrote, how two captures differ."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.jobs import GenerateJob
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.atomic import fsync_path
from eagle3_pipeline.store.records import read_records
from eagle3_pipeline.store.shards import (
    HEADER_BYTES,
    Geometry,
    ShardRecord,
    bf16_to_float32,
    map_states,
    read_index,
    seal_shards,
    shard_name,
    shard_number,
)
from eagle3_pipeline_tests.page_memory import in_pages

Tokens = dict[str, np.ndarray]


@dataclass(frozen=True)
class Prefilled:
    """What a prefill took: seconds in the engine, seconds of sealing the shards after it, their bytes."""

    num_tokens: int
    engine_s: float
    seal_s: float = 0.0
    num_bytes: int = 0
    faults: tuple[str, ...] = ()


def draw_sequences(count: int, mean_tokens: int, vocab: int, seed: int, lowest: int = 3) -> Tokens:
    """Random ids, four fifths to six fifths of the mean length each."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(mean_tokens * 4 // 5, mean_tokens * 6 // 5 + 1, count)
    return {f"s{seed}-{i:05d}": draw.integers(lowest, vocab, n).astype(np.int32) for i, n in enumerate(lengths)}


def prefill(client: EngineClient, spec: EngineSpec, sequences: Tokens, folder: Path) -> Prefilled:
    """Prefills the sequences; a capturing engine's shards are sealed and flushed."""
    folder.mkdir(parents=True)
    rows = [{"sequence_id": name, "input_ids": ids.tolist()} for name, ids in sequences.items()]
    schema = pa.schema([("sequence_id", pa.string()), ("input_ids", pa.list_(pa.int32()))])
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "prompts.parquet")
    states = folder / "states"
    job = GenerateJob(
        prompts=str(folder / "prompts.parquet"),
        journal=str(folder / "journal.jsonl"),
        sampling={"temperature": 0.0, "max_tokens": 1},
        capture_folder=str(states) if spec.layer_ids else "",
    )
    counts = client.generate(job)
    if not spec.layer_ids:
        return Prefilled(counts["prompt_tokens"], counts["elapsed_s"])
    geometry = Geometry(spec.layer_ids, spec.hidden_size)
    records = read_records(states)
    faults = _faults(states, records, sequences, geometry)
    started = time.monotonic()
    seal_shards(states, {r.sequence_id: r for r in records}.values(), sequences, geometry, {})
    flush_shards(states)
    sealed = time.monotonic() - started
    size = sum(path.stat().st_size for path in states.glob("shard-*"))
    return Prefilled(counts["prompt_tokens"], counts["elapsed_s"], sealed, size, tuple(faults))


def flush_shards(folder: Path) -> None:
    """Waits until they are on the disk, as publishing does."""
    for path in folder.glob("shard-*"):
        fsync_path(path)


def _faults(folder: Path, records: list[ShardRecord], sequences: Tokens, geometry: Geometry) -> list[str]:
    """What is wrong with the records as the engine left them: each sequence once, and no row beside theirs.

    But those before a whole block of the disk, where rows do not fill blocks.
    """
    found = sorted(record.sequence_id for record in records)
    faults = [f"record of {record.sequence_id}: {record.error}" for record in records if record.error]
    if found != sorted(sequences):
        faults.append(f"{len(found)} records of {len(set(found))} sequences, expected {len(sequences)}")
    places = sorted((record.shard, record.row_start, record.num_tokens) for record in records if not record.error)
    for path in folder.glob("shard-*"):
        end = 0
        for start, length in [(start, n) for shard, start, n in places if shard == shard_number(path)]:
            if not 0 <= start - end < geometry.rows_of_blocks:
                faults.append(f"{path.name}: rows {end} to {start} are of no sequence, or of two")
            end = start + length
        if path.stat().st_size != HEADER_BYTES + end * geometry.row_bytes:
            faults.append(f"{path.name} holds {path.stat().st_size:,} bytes, its {end} rows and header are others")
    return faults


def differences(found: Path, expected: Path, layer_ids: tuple[int, ...]) -> tuple[dict[int, float], float]:
    """Largest difference of each layer over all sequences; least one of neighbouring layers.

    Args:
        found: a prefill's folder.
        expected: another one's, of the same sequences.
        layer_ids: of both.
    """
    one, other = _states(found / "states"), _states(expected / "states")
    assert one.keys() == other.keys()
    largest = dict.fromkeys(layer_ids, 0.0)
    neighbours = []
    for name, states in one.items():
        for position, layer in enumerate(layer_ids):
            error = relative(states[:, position], other[name][:, position])
            largest[layer] = max(largest[layer], error)
            for beside in (layer - 1, layer + 1):
                if beside in layer_ids:
                    neighbours.append(relative(states[:, position], other[name][:, layer_ids.index(beside)]))
    return largest, min(neighbours)


def disk_gib_per_s(folder: Path, num_bytes: int) -> float:
    """Speed of four writers that append page-aligned memory to a shard, and of flushing."""
    appender = ShardAppender(folder / "disk-probe", Geometry((0,), 2048), 2**60)
    block = in_pages(np.random.default_rng(0).bytes(2**26))
    started = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: appender.append(str(number), block), range(num_bytes // len(block))))
    flush_shards(folder / "disk-probe")
    elapsed = time.monotonic() - started
    appender.close()
    shutil.rmtree(folder / "disk-probe")
    return num_bytes / 2**30 / elapsed


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of the expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _states(folder: Path) -> dict[str, np.ndarray]:
    """[n, A+1, H] float32 by sequence id."""
    states = {}
    for row in read_index(folder).to_pylist():
        values, _ = map_states(folder / shard_name(row["shard"]))
        states[row["sequence_id"]] = bf16_to_float32(values[row["row_start"] : row["row_start"] + row["num_tokens"]])
    return states
