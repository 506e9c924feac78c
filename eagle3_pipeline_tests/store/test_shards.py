"""Hidden-state shards: written by many threads, sealed, read back; what a dead writer leaves behind."""

import errno
import json
import os
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from eagle3_pipeline.errors import CaptureError, StoreError
from eagle3_pipeline.store import appender as appending
from eagle3_pipeline.store import records as recording
from eagle3_pipeline.store import shards
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline.store.objects import Store
from eagle3_pipeline.store.records import RecordReader, intact_records, read_records, written_records
from eagle3_pipeline.store.shards import (
    HEADER_BYTES,
    RECORDS_NAME,
    Geometry,
    ShardRecord,
    map_states,
    read_index,
    seal_shards,
    shard_name,
)

GEOMETRY = Geometry((1, 3, 4), 8)  # 3 layers x 8 x 2 bytes = 48 bytes a row
MANY = 1 << 30


def _rows(seed: int, num_tokens: int) -> np.ndarray:
    """Raw bf16 bits [n, A+1, H]."""
    return np.random.default_rng(seed).integers(0, 2**16, (num_tokens, 3, 8), dtype=np.uint16)


def _append(appender: ShardAppender, name: str, rows: np.ndarray) -> ShardRecord:
    return appender.append(name, rows.data)


def _ids(num_tokens: int, first: int = 0) -> np.ndarray:
    return np.arange(first, first + num_tokens, dtype=np.int32)


def test_a_row_is_layers_times_hidden_size_times_two_bytes() -> None:
    assert Geometry((2, 30, 58, 61), 7168).row_bytes == 57_344


def test_sequences_of_eight_threads_are_read_back_bit_exact(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 200)
    data = {f"s{i}": _rows(i, int(n)) for i, n in enumerate(lengths)}
    tokens = {f"s{i}": _ids(int(n), 1000 * i) for i, n in enumerate(lengths)}
    max_bytes = HEADER_BYTES + 300 * GEOMETRY.row_bytes
    appender = ShardAppender(tmp_path, GEOMETRY, max_bytes)
    names = list(data)

    def work(part: int) -> None:
        for name in names[part::8]:
            _append(appender, name, data[name])

    threads = [threading.Thread(target=work, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    appender.close()

    records = read_records(tmp_path)
    assert sorted(r.sequence_id for r in records) == sorted(names)
    index = seal_shards(tmp_path, records, tokens, GEOMETRY, {"layer_ids": [1, 3, 4], "verifier": "v"})
    assert read_index(tmp_path).equals(index)
    rows = index.to_pylist()
    assert sorted(row["sequence_id"] for row in rows) == sorted(names)
    used = {row["shard"] for row in rows}
    assert used == set(range(len(used))) and len(used) >= int(lengths.sum()) // 300
    assert not (tmp_path / RECORDS_NAME).exists()
    for number in used:
        path = tmp_path / shard_name(number)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"layer_ids": "[1, 3, 4]", "verifier": "v"}
            states, ids = file.get_slice("hidden_states"), file.get_tensor("input_ids").numpy()
            assert states.get_dtype() == "BF16" and states.get_shape() == [len(ids), 3, 8]
            own = [row for row in rows if row["shard"] == number]
            assert sum(row["num_tokens"] for row in own) == len(ids) <= 300, "no holes, no overlap"
            for row in own:
                part = slice(row["row_start"], row["row_start"] + row["num_tokens"])
                found = states[part].view(torch.uint16).numpy()
                assert np.array_equal(found, data[row["sequence_id"]])
                assert np.array_equal(ids[part], tokens[row["sequence_id"]])
                assert row["checksum"] == xxhash.xxh3_64_hexdigest(data[row["sequence_id"]].tobytes())
        mapped, mapped_ids = map_states(path)
        assert np.array_equal(mapped_ids, ids) and mapped.shape == (len(ids), 3, 8)


def test_a_shard_rolls_over_before_it_would_exceed_its_limit(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 10 * 48)
    lengths = [4, 6, 1, 10, 9, 2]
    places = [(r.shard, r.row_start) for r in (_append(appender, f"s{i}", _rows(i, n)) for i, n in enumerate(lengths))]
    # 4 + 6 fill shard 0; 1 + 10 does not fit, so 10 opens shard 2; 9 + 2 does not fit either.
    assert places == [(0, 0), (0, 4), (1, 0), (2, 0), (3, 0), (4, 0)]


def test_a_sequence_longer_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 10 * 48)
    records = [_append(appender, name, _rows(i, n)) for i, (name, n) in enumerate([("a", 3), ("long", 25), ("b", 3)])]
    assert [(r.shard, r.row_start, r.num_tokens) for r in records] == [(0, 0, 3), (1, 0, 25), (2, 0, 3)]
    tokens = {r.sequence_id: _ids(r.num_tokens) for r in records}
    seal_shards(tmp_path, records, tokens, GEOMETRY, {})
    assert np.array_equal(map_states(tmp_path / shard_name(1))[0], _rows(1, 25))


def test_rows_that_no_sequence_owns_have_token_id_minus_one(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    records = [_append(appender, name, _rows(i, 2)) for i, name in enumerate(["a", "given_up", "b", "tail"])]
    tokens = {"a": np.array([7, 8]), "b": np.array([9, 10])}
    index = seal_shards(tmp_path, [r for r in records if r.sequence_id in tokens], tokens, GEOMETRY, {})
    _, ids = map_states(tmp_path / shard_name(0))
    assert ids.tolist() == [7, 8, -1, -1, 9, 10], "the tail behind the last sequence is cut off"
    assert [(r["sequence_id"], r["row_start"]) for r in index.to_pylist()] == [("a", 0), ("b", 4)]


def test_a_shard_that_no_sequence_uses_is_removed(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 2 * 48)
    records = [_append(appender, name, _rows(i, 2)) for i, name in enumerate("ab")]
    seal_shards(tmp_path, records[1:], {"b": _ids(2)}, GEOMETRY, {})
    assert sorted(p.name for p in tmp_path.glob("shard-*")) == [shard_name(1)]


def test_a_growing_shard_is_no_safetensors_file(tmp_path: Path) -> None:
    _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    path = tmp_path / shard_name(0)
    assert path.read_bytes()[:HEADER_BYTES] == bytes(HEADER_BYTES)
    with pytest.raises(Exception, match="eader"):
        safe_open(path, "np")


def test_the_sealed_header_fills_its_reserved_region(tmp_path: Path) -> None:
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    seal_shards(tmp_path, [record], {"a": _ids(2)}, GEOMETRY, {"note": "x" * 3000})
    data = (tmp_path / shard_name(0)).read_bytes()
    assert struct.unpack("<Q", data[:8]) == (HEADER_BYTES - 8,)
    header = json.loads(data[8:HEADER_BYTES])
    assert header["hidden_states"] == {"dtype": "BF16", "shape": [2, 3, 8], "data_offsets": [0, 96]}
    assert header["input_ids"] == {"dtype": "I32", "shape": [2], "data_offsets": [96, 104]}
    assert data[HEADER_BYTES:] == _rows(0, 2).tobytes() + struct.pack("<2i", 0, 1)


def test_metadata_that_overflows_the_header_is_refused(tmp_path: Path) -> None:
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    with pytest.raises(CaptureError, match="header metadata of .* bytes exceeds 4088"):
        seal_shards(tmp_path, [record], {"a": _ids(2)}, GEOMETRY, {"note": "x" * 5000})


def test_sealing_refuses_a_record_of_another_length_than_its_sequence(tmp_path: Path) -> None:
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    with pytest.raises(CaptureError, match="sequence a has 2 rows of hidden states, expected 3"):
        seal_shards(tmp_path, [record], {"a": _ids(3)}, GEOMETRY, {})


def test_sealing_refuses_a_shard_that_lost_rows(tmp_path: Path) -> None:
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    with (tmp_path / shard_name(0)).open("r+b") as file:
        file.truncate(HEADER_BYTES + 95)
    with pytest.raises(CaptureError, match="shorter than its 2 recorded rows"):
        seal_shards(tmp_path, [record], {"a": _ids(2)}, GEOMETRY, {})


def test_sealing_twice_gives_the_same_files(tmp_path: Path) -> None:
    # A stage that dies after sealing seals again.
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    contents = []
    for _ in range(2):
        seal_shards(tmp_path, [record], {"a": _ids(2)}, GEOMETRY, {"k": 1})
        contents.append((tmp_path / shard_name(0)).read_bytes())
    assert contents[0] == contents[1]


def test_a_torn_last_record_is_read_when_it_is_whole(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    first, second = (_append(appender, name, _rows(i, 2)) for i, name in enumerate("ab"))
    path = tmp_path / RECORDS_NAME
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 10)
    with closing(RecordReader(tmp_path)) as reader:
        assert reader.read() == [first]
        assert reader.read() == []
        with path.open("ab") as file:
            file.write(whole[-10:])
        assert reader.read() == [second]
        assert reader.read() == []


def test_records_are_read_from_the_first_one_on_however_early_one_looks(tmp_path: Path) -> None:
    with closing(RecordReader(tmp_path)) as reader:
        assert reader.read() == []
        appender = ShardAppender(tmp_path, GEOMETRY, MANY)
        written = [_append(appender, f"s{number}", _rows(number, 2)) for number in range(3)]
        assert reader.read() == written
        more = _append(appender, "more", _rows(9, 4))
        assert reader.read() == [more]
    assert read_records(tmp_path) == [*written, more]


def test_more_records_than_are_read_at_once_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    written = [_append(appender, f"s{number}", _rows(number, 1)) for number in range(20)]
    monkeypatch.setattr(recording, "_READ_BYTES", 100)
    assert read_records(tmp_path) == written


def test_an_appender_after_a_torn_record_does_not_continue_its_line(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, MANY)
    first = _append(appender, "a", _rows(0, 2))
    _append(appender, "torn", _rows(1, 2))
    path = tmp_path / RECORDS_NAME
    path.write_bytes(path.read_bytes()[:-10])
    restarted = ShardAppender(tmp_path, GEOMETRY, MANY)
    third, fourth = (_append(restarted, name, _rows(2, 3)) for name in ("c", "d"))
    assert read_records(tmp_path) == [first, third, fourth]
    assert set(intact_records(tmp_path, GEOMETRY)) == {"a", "c", "d"}


def test_a_restarted_appender_leaves_old_shards_alone(tmp_path: Path) -> None:
    _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    before = (tmp_path / shard_name(0)).read_bytes()
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "b", _rows(1, 2))
    assert (record.shard, record.row_start) == (1, 0)
    assert (tmp_path / shard_name(0)).read_bytes() == before
    (tmp_path / shard_name(0)).unlink()
    record = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "c", _rows(1, 2))
    assert (record.shard, record.error) == (2, ""), "a gap in the numbers does not lead to a number that exists"


def test_only_records_with_intact_bytes_are_kept(tmp_path: Path) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 4 * 48)
    kept, flipped, cut, gone = (_append(appender, name, _rows(i, 2)) for i, name in enumerate(["k", "f", "c", "g"]))
    assert (flipped.shard, flipped.row_start, cut.shard) == (0, 2, 1)
    with (tmp_path / shard_name(0)).open("r+b") as file:
        file.seek(HEADER_BYTES + 2 * 48 + 95)
        last = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    with (tmp_path / shard_name(1)).open("r+b") as file:
        file.truncate(HEADER_BYTES + 2 * 48 + 10)
    with (tmp_path / RECORDS_NAME).open("a") as file:
        file.write(json.dumps({"sequence_id": "lost", "num_tokens": 2, "error": "OSError: [Errno 5]"}) + "\n")
        file.write(json.dumps({"sequence_id": "nowhere", "shard": 9, "row_start": 0, "num_tokens": 2}) + "\n")
    assert intact_records(tmp_path, GEOMETRY) == {"k": kept, "c": cut}
    assert gone.shard == 1, "the sequence whose rows were cut off"


def test_a_second_capture_of_a_sequence_replaces_a_damaged_first(tmp_path: Path) -> None:
    _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    (tmp_path / shard_name(0)).write_bytes(bytes(HEADER_BYTES + 96))
    again = _append(ShardAppender(tmp_path, GEOMETRY, MANY), "a", _rows(0, 2))
    assert intact_records(tmp_path, GEOMETRY) == {"a": again}


@pytest.mark.parametrize("damaged", [None, 0, 1])
def test_of_two_copies_of_a_sequence_an_intact_one_counts_after_a_pass(tmp_path: Path, damaged: int | None) -> None:
    """A pass was cut off between a sequence's record and its answer: the next one captured it again."""
    copies = []
    for _ in range(2):
        appender = ShardAppender(tmp_path, GEOMETRY, MANY)
        copies.append(_append(appender, "a", _rows(1, 2)))
        appender.close()
    if damaged is not None:
        path = tmp_path / shard_name(damaged)
        data = bytearray(path.read_bytes())
        data[HEADER_BYTES] ^= 1
        path.write_bytes(data)
    assert written_records(tmp_path, GEOMETRY) == {"a": copies[1 if damaged is None else 1 - damaged]}


def test_an_error_is_no_record_of_a_written_sequence(tmp_path: Path) -> None:
    records = [ShardRecord("a", 0, 0, 2), ShardRecord("b", error="full")]
    (tmp_path / RECORDS_NAME).write_text("".join(json.dumps(vars(record)) + "\n" for record in records))
    assert written_records(tmp_path, GEOMETRY) == {"a": records[0]}


def test_an_appender_knows_that_its_folder_was_published(tmp_path: Path) -> None:
    folder = tmp_path / "partial"
    appender = ShardAppender(folder, GEOMETRY, MANY)
    assert appender.is_current()
    _append(appender, "a", _rows(0, 2))
    assert appender.is_current()
    folder.rename(tmp_path / "final")
    assert not appender.is_current()
    # A new folder of the same name has another shard 0.
    other = ShardAppender(folder, GEOMETRY, MANY)
    _append(other, "a", _rows(0, 2))
    assert not appender.is_current() and other.is_current()


def test_an_appender_is_current_while_other_threads_change_shards(tmp_path: Path) -> None:
    # Two rows a shard: every append leaves a shard for the next one.
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 2 * GEOMETRY.row_bytes)
    rows, running = _rows(0, 2), threading.Event()
    running.set()

    def ask() -> list[bool]:
        found = []
        while running.is_set():
            found.append(appender.is_current())
        return found

    def write(writer: int) -> list[ShardRecord]:
        return [_append(appender, f"{writer}-{i}", rows) for i in range(400)]

    with ThreadPoolExecutor(5) as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        writing = [pool.submit(write, writer) for writer in range(2)]
        records = [record for one in writing for record in one.result()]
        running.clear()
        answers = [answer for one in asking for answer in one.result()]
    assert all(answers) and len(answers) > 100
    assert not any(record.error for record in records)
    assert {record.shard for record in records} == set(range(800))


def test_bf16_bits_convert_as_in_torch() -> None:
    random = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e3
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3.4e38, 1.0, -1.5])
    values = torch.cat([random, special]).to(torch.bfloat16)
    found = shards.bf16_to_float32(values.view(torch.uint16).numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, values.float().numpy(), equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(values.float().numpy()))
    every = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(every.copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(shards.bf16_to_float32(every), expected, equal_nan=True)


def test_the_disk_is_given_what_is_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sealing had to flush all at once held up the end of every chunk by seconds."""
    given: list[tuple[str, int, int]] = []

    def note(descriptor: int, offset: int, num_bytes: int) -> None:
        given.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, offset, num_bytes))

    monkeypatch.setattr(appending, "start_writeback", note)
    appender = ShardAppender(tmp_path, GEOMETRY, HEADER_BYTES + 10 * GEOMETRY.row_bytes)
    for i in range(3):
        _append(appender, f"s{i}", _rows(i, 4))
    # Rows of 48 bytes; the third sequence would make twelve rows in a shard of ten.
    first, second = shard_name(0), shard_name(1)
    assert given == [(first, 4096, 192), (first, 4096 + 192, 192), (second, 4096, 192)]


@pytest.mark.skipif(sys.platform != "linux", reason="the call is Linux'")
def test_write_back_can_be_started_here(tmp_path: Path) -> None:
    call = appending._sync_file_range()
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 10_000)
        file.flush()
        assert call and call(file.fileno(), 0, 10_000, appending._SYNC_FILE_RANGE_WRITE) == 0
        assert call(-1, 0, 1, appending._SYNC_FILE_RANGE_WRITE) == -1


def test_a_disk_that_breaks_is_seen_before_a_shard_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        if "shard" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, "the disk broke")

    store = Store(tmp_path)
    with store.write("hidden_states", "f") as writer:
        appender = ShardAppender(writer.folder, GEOMETRY, MANY)
        record = _append(appender, "a", _rows(0, 4))
        seal_shards(writer.folder, [record], {"a": _ids(4)}, GEOMETRY, {})
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(StoreError, match="the disk broke"):
            writer.publish(Manifest(stage="hidden_states", fingerprint="f", content_id="c", spec={}, inputs={}))
    assert store.get("hidden_states", "f") is None
