"""Page-aligned memory goes to shards past the page cache, where disk and memory allow it."""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.records import intact_records, read_records
from eagle3_pipeline.store.shards import HEADER_BYTES, Geometry, map_states, read_index, seal_shards, shard_name
from eagle3_pipeline_tests.page_memory import in_pages

GEOMETRY = Geometry((1, 3, 4), 8)  # 48 bytes a row: 256 rows fill three blocks of 4096 bytes
MANY = 1 << 30
PWRITE = os.pwrite


def _rows(seed: int, num_tokens: int, hidden_size: int = 8) -> np.ndarray:
    """Raw bf16 bits [n, 3, H]."""
    return np.random.default_rng(seed).integers(1, 0x7F80, (num_tokens, 3, hidden_size), dtype=np.uint16)


def _in_pages(rows: np.ndarray) -> memoryview:
    return in_pages(rows.tobytes())


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """Every `pwrite`: whether past the page cache, offset, bytes."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of temporary files writes through the page cache only")
    calls: list[tuple[bool, int, int]] = []

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append((_is_direct(descriptor), offset, len(data)))
        return PWRITE(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    return calls


def test_whole_blocks_pass_the_page_cache_by_and_the_rest_does_not(
    tmp_path: Path, written: list[tuple[bool, int, int]]
) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    first, second, third = _rows(0, 100), _rows(1, 200), _rows(2, 10)
    records = appender.append_all(["a", "b"], [100, 200], _in_pages(np.concatenate([first, second])))
    records.append(appender.append("c", _in_pages(third)))
    # 300 rows are 14,400 bytes: three blocks and 2,112 bytes. The third sequence fills no block.
    assert written == [(True, 4096, 12_288), (False, 4096 + 12_288, 2112), (False, 4096 + 300 * 48, 480)]
    assert [record.row_start for record in records] == [0, 100, 300]
    assert set(intact_records(tmp_path, GEOMETRY)) == {"a", "b", "c"}
    states = (tmp_path / shard_name(0)).read_bytes()[HEADER_BYTES:]
    assert states == b"".join(rows.tobytes() for rows in (first, second, third))


def test_a_run_begins_at_a_whole_block_and_the_rows_before_have_no_owner(
    tmp_path: Path, written: list[tuple[bool, int, int]]
) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    lengths = {"a": 300, "b": 90, "c": 86}
    records = [appender.append(name, _in_pages(_rows(i, n))) for i, (name, n) in enumerate(lengths.items())]
    # 512 is the first multiple of 256 behind 300 rows, 768 behind 602.
    assert [record.row_start for record in records] == [0, 512, 768]
    assert [call for call in written if call[0]] == [
        (True, 4096, 12_288),
        (True, 4096 + 512 * 48, 4096),
        (True, 4096 + 768 * 48, 4096),
    ]
    tokens = {name: np.arange(n, dtype=np.int32) for name, n in lengths.items()}
    seal_shards(tmp_path, records, tokens, GEOMETRY, {})
    states, ids = map_states(tmp_path / shard_name(0))
    assert len(ids) == 768 + 86
    owned = np.zeros(len(ids), dtype=bool)
    for i, (name, record) in enumerate(zip(lengths, records, strict=True)):
        part = slice(record.row_start, record.row_start + lengths[name])
        assert np.array_equal(states[part], _rows(i, lengths[name])) and np.array_equal(ids[part], tokens[name])
        owned[part] = True
    assert (ids[~owned] == -1).all() and not states[~owned].any()


def test_rows_that_fill_blocks_leave_none_without_an_owner(tmp_path: Path, written: list) -> None:
    wide = Geometry((1, 3, 4), 2048)
    appender = ShardAppender(tmp_path, wide, MANY)
    records = [appender.append(f"s{i}", _in_pages(_rows(i, n, 2048))) for i, n in enumerate((3, 1, 2))]
    assert [record.row_start for record in records] == [0, 3, 4]
    assert all(direct for direct, _, _ in written)


def test_many_threads_and_shards_are_read_back_bit_exact(tmp_path: Path, written: list[tuple[bool, int, int]]) -> None:
    lengths = np.random.default_rng(1).integers(1, 400, 160)
    data = {f"s{i}": _rows(i, int(n)) for i, n in enumerate(lengths)}
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 3000 * GEOMETRY.row_bytes)
    groups = [list(data)[start : start + 5] for start in range(0, 160, 5)]

    def write(names: list[str]) -> None:
        together = np.concatenate([data[name] for name in names])
        appender.append_all(names, [len(data[name]) for name in names], _in_pages(together))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, groups))
    appender.close()
    records = read_records(tmp_path)
    tokens = {name: np.arange(len(rows), dtype=np.int32) for name, rows in data.items()}
    seal_shards(tmp_path, records, tokens, GEOMETRY, {})
    index = read_index(tmp_path).to_pylist()
    assert sorted(row["sequence_id"] for row in index) == sorted(data)
    for row in index:
        states, ids = map_states(tmp_path / shard_name(row["shard"]))
        part = slice(row["row_start"], row["row_start"] + row["num_tokens"])
        assert np.array_equal(states[part], data[row["sequence_id"]])
        assert np.array_equal(ids[part], tokens[row["sequence_id"]])
    assert len({row["shard"] for row in index}) > 5
    assert sum(size for direct, _, size in written if direct) > 0.5 * sum(rows.nbytes for rows in data.values())


def _failing(number: int, calls: list[bool]) -> Callable[[int, memoryview, int], int]:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        calls.append(_is_direct(descriptor))
        if calls[-1]:
            raise OSError(number, os.strerror(number))
        return PWRITE(descriptor, data, offset)

    return pwrite


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP])
def test_what_cannot_be_written_so_goes_through_the_page_cache_from_then_on(
    tmp_path: Path, written: list, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(os, "pwrite", _failing(number, calls))
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    records = [appender.append(f"s{i}", _in_pages(_rows(i, 300))) for i in range(3)]
    assert calls == [True, False, False, False]
    assert [(record.error, record.row_start) for record in records] == [("", 0), ("", 300), ("", 600)]
    assert intact_records(tmp_path, GEOMETRY) == {record.sequence_id: record for record in records}


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_loses_the_sequence_with_the_reason(
    tmp_path: Path, written: list, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "pwrite", _failing(number, []))
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    assert f"Errno {number}" in appender.append("a", _in_pages(_rows(0, 300))).error


def test_a_file_system_without_direct_writes_is_written_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str | Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not here")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    records = [appender.append(f"s{i}", _in_pages(_rows(i, 300))) for i in range(2)]
    assert [record.row_start for record in records] == [0, 300]
    assert len(intact_records(tmp_path, GEOMETRY)) == 2


def test_short_writes_go_on_where_they_ended(tmp_path: Path, written: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        return PWRITE(descriptor, data[: 4096 if _is_direct(descriptor) else 100], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    rows = _rows(0, 500)
    appender.append("a", _in_pages(rows))
    assert (tmp_path / shard_name(0)).read_bytes()[HEADER_BYTES:] == rows.tobytes()


def test_what_fails_after_a_part_was_written_is_written_whole(
    tmp_path: Path, written: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if _is_direct(descriptor) and offset > HEADER_BYTES:
            raise OSError(errno.EINVAL, "not any more")
        return PWRITE(descriptor, data[:4096], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    record = appender.append("a", _in_pages(_rows(0, 500)))
    assert intact_records(tmp_path, GEOMETRY) == {"a": record}


def test_a_full_disk_is_a_record_with_its_reason(
    tmp_path: Path, written: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > HEADER_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return PWRITE(descriptor, data[:4096], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    assert "Errno 28" in appender.append("a", _in_pages(_rows(0, 500))).error
    assert not intact_records(tmp_path, GEOMETRY)


def test_no_descriptor_is_left_open(tmp_path: Path, written: list) -> None:
    before = len(os.listdir("/proc/self/fd"))
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 700 * GEOMETRY.row_bytes)
    for i in range(20):
        appender.append_all([f"{i}a", f"{i}b"], [300, 200], _in_pages(_rows(i, 500)))
    # The open shard by both ways, and the records.
    assert len(os.listdir("/proc/self/fd")) == before + 3
    appender.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_shard_that_could_not_be_begun_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, fails = os.ftruncate, [True]

    def ftruncate(descriptor: int, length: int) -> None:
        if fails.pop() if fails else False:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, length)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    first, second = (appender.append(name, _rows(0, 3).data) for name in "ab")
    assert "Errno 28" in first.error and (second.error, second.shard, second.row_start) == ("", 0, 0)


def test_larger_pages_are_not_shared_by_writes_of_both_kinds(
    tmp_path: Path, written: list[tuple[bool, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "PAGESIZE", 65_536)
    ShardAppender(tmp_path, GEOMETRY, MANY).append("a", _in_pages(_rows(0, 500)))
    assert written == [(False, HEADER_BYTES, 24_000)]
