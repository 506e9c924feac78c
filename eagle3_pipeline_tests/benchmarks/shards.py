"""How fast captured states reach flushed shards on this folder's disk, against one writer that does nothing else."""

import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.shards import Geometry, ShardRecord, seal_shards
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import disk_gib_per_s, flush_shards
from eagle3_pipeline_tests.page_memory import in_pages

_GEOMETRY = Geometry((2, 15, 27, 30), 576)
_CHUNKS, _WRITERS, _SEQUENCES, _TOKENS = 6, 4, 12, 14_000
_MAX_SHARD_BYTES = 2**31


def run() -> dict[str, Any]:
    """GiB/s of the disk alone, of writers of six chunks at once, and until all is sealed and flushed."""
    found: dict[str, Any] = {}
    # The second time counts: memory that a virtual machine was not given yet is slower than its disk.
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:
            found = {"disk alone (GiB/s)": disk_gib_per_s(Path(temporary), 2**31), **_write_and_seal(Path(temporary))}
    return found


def _write_and_seal(folder: Path) -> dict[str, Any]:
    tokens = np.zeros(_TOKENS, dtype=np.int32)
    states = in_pages(np.random.default_rng(0).bytes(_TOKENS * _GEOMETRY.row_bytes))
    appenders = [ShardAppender(folder / str(chunk), _GEOMETRY, _MAX_SHARD_BYTES) for chunk in range(_CHUNKS)]

    def write(number: int) -> tuple[int, ShardRecord]:
        return number % _CHUNKS, appenders[number % _CHUNKS].append(f"s{number}", states)

    def seal(chunk: int) -> None:
        own = [record for of, record in records if of == chunk]
        seal_shards(folder / str(chunk), own, {record.sequence_id: tokens for record in own}, _GEOMETRY, {})
        flush_shards(folder / str(chunk))

    started = time.monotonic()
    with ThreadPoolExecutor(_WRITERS) as pool:
        records = list(pool.map(write, range(_CHUNKS * _SEQUENCES)))
        written_s = time.monotonic() - started
        list(pool.map(seal, range(_CHUNKS)))
    sealed_s = time.monotonic() - started
    gib = _CHUNKS * _SEQUENCES * len(states) / 2**30
    what = f"{_CHUNKS} chunks, {_WRITERS} writers, {gib:.1f} GiB"
    return {f"{what}: written (GiB/s)": gib / written_s, f"{what}: sealed (GiB/s)": gib / sealed_s}
