"""How fast captured states reach flushed shards on this folder's disk, against one writer that does nothing else.

And beside a thread of the same process that never waits, as an engine's own with short sequences of a small verifier.
"""

import tempfile
import time
from collections.abc import Callable
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
# Written at once by the engine's threads: 64 MiB.
_BUSY_WRITERS, _BUSY_GROUPS, _BUSY_SEQUENCES, _BUSY_TOKENS = 8, 64, 70, 204


def run() -> dict[str, Any]:
    """GiB/s of the disk alone, of writers of six chunks at once, and until all is sealed and flushed."""
    found: dict[str, Any] = {}
    # The second time counts: memory that a virtual machine was not given yet is slower than its disk.
    for _ in range(2):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:
            found = {"disk alone (GiB/s)": disk_gib_per_s(Path(temporary), 2**31), **_write_and_seal(Path(temporary))}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:
        return found | _write_beside_a_busy_thread(Path(temporary))


def _write_beside_a_busy_thread(folder: Path) -> dict[str, Any]:
    """Python's lock is held by one thread at a time, and a writer that wants it back waits for up to 5 ms."""
    states = np.random.default_rng(0).integers(0x3F80, 0x4000, 2**25, dtype=np.uint16)
    data = in_pages(states.tobytes())[: _BUSY_SEQUENCES * _BUSY_TOKENS * _GEOMETRY.row_bytes]
    appenders = [ShardAppender(folder / str(writer), _GEOMETRY, _MAX_SHARD_BYTES) for writer in range(_BUSY_WRITERS)]
    names = [f"s{number}" for number in range(_BUSY_SEQUENCES)]

    def write(number: int) -> None:
        appenders[number % _BUSY_WRITERS].append_all(names, [_BUSY_TOKENS] * len(names), data)

    until = time.monotonic() + 1.0
    alone = _steps_per_s(lambda: time.monotonic() > until)
    with ThreadPoolExecutor(_BUSY_WRITERS) as pool:
        started = time.monotonic()
        written = [pool.submit(write, number) for number in range(_BUSY_GROUPS)]
        busy = _steps_per_s(lambda: all(one.done() for one in written))
        written_s = time.monotonic() - started
        for one in written:
            one.result()
    what = f"{_BUSY_WRITERS} writers of {_BUSY_TOKENS} tokens beside a busy thread"
    return {
        f"{what} (sequences/s)": _BUSY_GROUPS * _BUSY_SEQUENCES / written_s,
        f"{what}: its own speed, of that alone (%)": 100 * busy / alone,
    }


def _steps_per_s(over: Callable[[], bool]) -> float:
    started, steps = time.monotonic(), 0
    while not over():
        sum(range(20_000))
        steps += 1
    return steps / (time.monotonic() - started)


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
