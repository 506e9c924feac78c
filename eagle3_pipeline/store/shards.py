"""Hidden-state shards: appended by the engine's writer threads, sealed by the stage, read memory-mapped.

A shard is a safetensors file: a header region of fixed size, then `hidden_states` [T, A+1, H] bf16, then `input_ids`
[T] i32 (-1 on rows that no sequence owns). While it grows, the header region is zero, so no reader takes it for
finished. One record a sequence goes to `records.jsonl`; the writer process may die at any point.
"""

import contextlib
import ctypes
import functools
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from eagle3_pipeline.errors import CaptureError

HEADER_BYTES = 4096
_SYNC_FILE_RANGE_WRITE = 2
RECORDS_NAME = "records.jsonl"
INDEX_NAME = "index.parquet"
LAYER_CONVENTION = "id i is the input of layer i; the last id is the last layer's output before the final norm"
_INDEX_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("shard", pa.int32()),
        ("row_start", pa.int64()),
        ("num_tokens", pa.int64()),
        ("checksum", pa.string()),
    ]
)


@dataclass(frozen=True)
class Geometry:
    """Shape of a row: layer ids in ascending order (the last layer's last), hidden size H."""

    layer_ids: tuple[int, ...]
    hidden_size: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token: layers x hidden size x 2 (bf16)."""
        return len(self.layer_ids) * self.hidden_size * 2


@dataclass(frozen=True)
class ShardRecord:
    """What became of one sequence: its place in a shard, or the error that lost it."""

    sequence_id: str
    shard: int = -1
    row_start: int = -1
    num_tokens: int = 0
    checksum: str = ""
    error: str = ""


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def shard_number(path: Path) -> int:
    """The inverse of `shard_name`."""
    return int(path.stem.removeprefix("shard-"))


@dataclass
class _Run:
    """Rows of sequences that follow each other in a shard, or why there is no place for them."""

    descriptor: int = -1
    shard: int = -1
    row_start: int = -1
    lengths: list[int] = field(default_factory=list)
    error: OSError | None = None


class ShardAppender:
    """Appends whole sequences to the open shard of a folder; thread-safe; one per folder and process."""

    def __init__(self, folder: Path, row_bytes: int, max_shard_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._row_bytes = row_bytes
        self._max_bytes = max_shard_bytes
        self._lock = threading.Lock()
        self._shard = max(map(shard_number, folder.glob("shard-*.safetensors")), default=-1)
        self._descriptor = -1
        self._records = -1
        self._rows = 0
        self._unrecorded: list[ShardRecord] = []
        # A process that died within a record left a torn line; the next record must not continue it.
        self._line_break = b"\n" if _ends_torn(folder / RECORDS_NAME) else b""

    def append(self, sequence_id: str, data: memoryview) -> ShardRecord:
        """Writes one sequence; see `append_all`."""
        num_tokens = data.nbytes // self._row_bytes
        return self.append_all([sequence_id], [num_tokens], data)[0]

    def append_all(self, sequence_ids: Sequence[str], lengths: Sequence[int], data: memoryview) -> list[ShardRecord]:
        """Writes sequences and a record of each; an I/O error becomes their records, not an exception.

        Args:
            sequence_ids: ids of the sequences.
            lengths: rows n of each.
            data: their rows one after the other, C-contiguous bytes of [sum of n, A+1, H] bf16.
        """
        # An empty view cannot be cast.
        data = data.cast("B") if data.nbytes else memoryview(b"")
        records, start = list[ShardRecord](), 0
        with self._allocate(lengths) as runs:
            for run in runs:
                names = sequence_ids[len(records) : len(records) + len(run.lengths)]
                end = start + sum(run.lengths) * self._row_bytes
                records += self._write_run(run, names, data[start:end])
                start = end
        self._record(records)
        return records

    def _write_run(self, run: "_Run", names: Sequence[str], data: memoryview) -> list[ShardRecord]:
        try:
            if run.error:
                raise run.error
            offset = HEADER_BYTES + run.row_start * self._row_bytes
            _pwrite_all(run.descriptor, data, offset)
            start_writeback(run.descriptor, offset, len(data))
        except OSError as error:
            lost = f"{type(error).__name__}: {error}"
            return [ShardRecord(name, num_tokens=n, error=lost) for name, n in zip(names, run.lengths, strict=True)]
        records, row = [], run.row_start
        for name, n in zip(names, run.lengths, strict=True):
            start = (row - run.row_start) * self._row_bytes
            checksum = xxhash.xxh3_64_hexdigest(data[start : start + n * self._row_bytes])
            records.append(ShardRecord(name, run.shard, row, n, checksum))
            row += n
        return records

    @contextlib.contextmanager
    def _allocate(self, lengths: Sequence[int]) -> Iterator[list["_Run"]]:
        """Places for sequences of these lengths, those that follow each other in a shard as one run."""
        runs: list[_Run] = []
        with self._lock:
            for length in lengths:
                try:
                    end = HEADER_BYTES + (self._rows + length) * self._row_bytes
                    if self._descriptor < 0 or (self._rows and end > self._max_bytes):
                        self._open_next()
                    if not runs or runs[-1].error or runs[-1].shard != self._shard:
                        # A descriptor of its own, so that the shard may be left for the next one while a write runs.
                        runs.append(_Run(os.dup(self._descriptor), self._shard, self._rows))
                    self._rows += length
                except OSError as error:
                    runs.append(_Run(error=error))
                runs[-1].lengths.append(length)
        try:
            yield runs
        finally:
            for run in runs:
                if run.descriptor >= 0:
                    os.close(run.descriptor)

    def _open_next(self) -> None:
        path = self._folder / shard_name(self._shard + 1)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.ftruncate(descriptor, HEADER_BYTES)
        self._close_shard()
        self._descriptor, self._shard, self._rows = descriptor, self._shard + 1, 0

    def _record(self, records: list[ShardRecord]) -> None:
        with self._lock:
            self._unrecorded += records
            lines = self._line_break + "".join(json.dumps(asdict(r)) + "\n" for r in self._unrecorded).encode()
            # On a full disk the record waits for the next one; the host sees the stall and the full disk.
            with contextlib.suppress(OSError):
                if self._records < 0:
                    path = self._folder / RECORDS_NAME
                    self._records = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                _write_or_undo(self._records, lines)
                self._unrecorded.clear()
                self._line_break = b""

    def is_current(self) -> bool:
        """Whether its files are still in their folder; false once the folder was sealed, published or given up."""
        # Another thread may be leaving the shard for the next one.
        with self._lock:
            open_files = [(shard_name(self._shard), self._descriptor), (RECORDS_NAME, self._records)]
            found = [_is_at(descriptor, self._folder / name) for name, descriptor in open_files if descriptor >= 0]
        return all(found) if found else self._folder.is_dir()

    def close(self) -> None:
        """Closes the open shard and the records."""
        with self._lock:
            self._close_shard()
            if self._records >= 0:
                os.close(self._records)
                self._records = -1

    def _close_shard(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Lets the disk write these bytes of a file now, without waiting for it, so that sealing has little left to flush.

    By itself the kernel begins seconds later, and then holds up who writes. What the disk cannot take is an error of
    the flush. Does nothing where there is no such call (it is Linux').
    """
    if call := _sync_file_range():
        call(descriptor, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    with contextlib.suppress(AttributeError, OSError):
        call = ctypes.CDLL(None).sync_file_range
        call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        return call
    return None


def _write_or_undo(descriptor: int, data: bytes) -> None:
    before = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, data) != len(data):
            raise OSError("short write")
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            return file.read(1) not in (b"", b"\n")
    except FileNotFoundError:
        return False


def seal_shards(
    folder: Path, records: Iterable[ShardRecord], tokens: dict[str, np.ndarray], geometry: Geometry, metadata: dict
) -> pa.Table:
    """Turns grown shards into finished safetensors files and writes the index.

    Args:
        folder: where the shards lie.
        records: one per sequence to index; others stay unreferenced.
        tokens: input ids [n] of each recorded sequence.
        geometry: shape of a row.
        metadata: strings for the header.

    Returns:
        The index: sequence_id, shard, row_start, num_tokens, checksum.

    Raises:
        CaptureError: a record's length differs from its sequence's, or its rows lie beyond the file.
    """
    by_shard: dict[int, list[ShardRecord]] = {}
    for record in records:
        expected = len(tokens[record.sequence_id])
        if record.num_tokens != expected:
            raise CaptureError(
                f"{folder}: sequence {record.sequence_id} has {record.num_tokens} rows of hidden states, "
                f"expected {expected} (one per input token)"
            )
        by_shard.setdefault(record.shard, []).append(record)
    for path in sorted(folder.glob("shard-*.safetensors")):
        _seal_one(path, by_shard.get(shard_number(path), []), tokens, geometry, metadata)
    ordered = sorted(by_shard.items())
    rows = [asdict(r) for _, group in ordered for r in sorted(group, key=lambda r: r.row_start)]
    index = pa.Table.from_pylist(rows, schema=_INDEX_SCHEMA)
    pq.write_table(index, folder / INDEX_NAME)
    (folder / RECORDS_NAME).unlink(missing_ok=True)
    return index


def _seal_one(
    path: Path, records: list[ShardRecord], tokens: dict[str, np.ndarray], geometry: Geometry, metadata: dict
) -> None:
    num_rows = max((r.row_start + r.num_tokens for r in records), default=0)
    if not num_rows:
        path.unlink()
        return
    states_bytes = num_rows * geometry.row_bytes
    if path.stat().st_size < HEADER_BYTES + states_bytes:
        raise CaptureError(f"{path} is shorter than its {num_rows} recorded rows")
    input_ids = np.full(num_rows, -1, dtype="<i4")
    for record in records:
        input_ids[record.row_start : record.row_start + record.num_tokens] = tokens[record.sequence_id]
    header = {
        "__metadata__": {str(k): str(v) for k, v in metadata.items()},
        "hidden_states": {
            "dtype": "BF16",
            "shape": [num_rows, len(geometry.layer_ids), geometry.hidden_size],
            "data_offsets": [0, states_bytes],
        },
        "input_ids": {"dtype": "I32", "shape": [num_rows], "data_offsets": [states_bytes, states_bytes + num_rows * 4]},
    }
    text = json.dumps(header).encode().ljust(HEADER_BYTES - 8)
    if len(text) != HEADER_BYTES - 8:
        raise CaptureError(f"{path}: header metadata of {len(text)} bytes exceeds {HEADER_BYTES - 8}")
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.ftruncate(descriptor, HEADER_BYTES + states_bytes)
        _pwrite_all(descriptor, memoryview(input_ids.tobytes()), HEADER_BYTES + states_bytes)
        os.fsync(descriptor)
        _pwrite_all(descriptor, memoryview(struct.pack("<Q", len(text)) + text), 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_index(folder: Path) -> pa.Table:
    """The index of a sealed folder."""
    return pq.read_table(folder / INDEX_NAME)


def map_states(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Maps a sealed shard without reading it.

    Returns:
        `hidden_states` [T, A+1, H] as raw bf16 bits (uint16), `input_ids` [T] int32.
    """
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    base = 8 + length
    shape = tuple(header["hidden_states"]["shape"])
    states = np.memmap(path, dtype="<u2", mode="r", offset=base, shape=shape)
    ids = np.memmap(path, dtype="<i4", mode="r", offset=base + header["input_ids"]["data_offsets"][0], shape=shape[:1])
    return states, ids


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Raw bf16 bits to float32: bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
