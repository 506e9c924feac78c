"""Grows hidden-state shards: what the engine's writer threads append, with a record of what became of each sequence.

Rows go to the disk past the page cache where that is possible: filling it takes more of the CPU than all the rest, and
more time than the disk (docs/benchmarks.md).
"""

import contextlib
import ctypes
import errno
import functools
import json
import logging
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

from eagle3_pipeline.store.shards import (
    BLOCK_BYTES,
    HEADER_BYTES,
    RECORDS_NAME,
    Geometry,
    ShardRecord,
    pwrite_all,
    shard_name,
    shard_number,
)
from eagle3_pipeline.store.values import look_at

_SYNC_FILE_RANGE_WRITE = 2
# What file systems and memory that cannot be written from answer.
_NOT_DIRECT = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)
_log = logging.getLogger(__name__)


@dataclass
class _Run:
    """Rows of sequences that follow each other in a shard, or why there is no place for them.

    Attributes:
        descriptor: of the shard.
        direct: of the same file, past the page cache; -1: there is none.
    """

    descriptor: int = -1
    direct: int = -1
    shard: int = -1
    row_start: int = -1
    lengths: list[int] = field(default_factory=list)
    error: OSError | None = None


class ShardAppender:
    """Appends whole sequences to the open shard of a folder; thread-safe; one per folder and process.

    Args:
        folder: of the shards; is made.
        geometry: shape of a row.
        max_shard_bytes: a shard that would grow beyond is left for the next one, unless it is empty.
    """

    def __init__(self, folder: Path, geometry: Geometry, max_shard_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._geometry = geometry
        self._row_bytes = geometry.row_bytes
        self._max_bytes = max_shard_bytes
        self._lock = threading.Lock()
        self._shard = max(map(shard_number, folder.glob("shard-*.safetensors")), default=-1)
        self._descriptor = self._direct = -1
        # Where pages are larger, writes of both kinds would meet in one.
        self._may_be_direct = hasattr(os, "O_DIRECT") and mmap.PAGESIZE == BLOCK_BYTES
        self._records = -1
        self._rows = 0
        self._unrecorded: list[ShardRecord] = []
        # A process that died within a record left a torn line; the next record must not continue it.
        self._line_break = b"\n" if _ends_torn(folder / RECORDS_NAME) else b""

    def append(self, sequence_id: str, data: memoryview, ids: str = "") -> ShardRecord:
        """Writes one sequence; see `append_all`."""
        num_tokens = data.nbytes // self._row_bytes
        return self.append_all([sequence_id], [num_tokens], data, [ids])[0]

    def append_all(
        self, sequence_ids: Sequence[str], lengths: Sequence[int], data: memoryview, ids: Sequence[str] = ()
    ) -> list[ShardRecord]:
        """Writes sequences and a record of each; an I/O error becomes their records, not an exception.

        Args:
            sequence_ids: ids of the sequences.
            lengths: rows n of each.
            data: their rows one after the other, C-contiguous bytes of [sum of n, A+1, H] bf16. Page-aligned memory is
                written past the page cache, from the next whole block of the shard on; rows before it have no owner.
            ids: `ids_checksum` of each sequence's tokens.
        """
        # An empty view cannot be cast.
        data = data.cast("B") if data.nbytes else memoryview(b"")
        records, start, ids = list[ShardRecord](), 0, ids or [""] * len(lengths)
        with self._allocate(lengths, _is_aligned(data)) as runs:
            for run in runs:
                own = slice(len(records), len(records) + len(run.lengths))
                end = start + sum(run.lengths) * self._row_bytes
                records += self._write_run(run, sequence_ids[own], ids[own], data[start:end])
                start = end
        self._record(records)
        return records

    def _write_run(self, run: _Run, names: Sequence[str], ids: Sequence[str], data: memoryview) -> list[ShardRecord]:
        try:
            if run.error:
                raise run.error
            self._write(run, data, HEADER_BYTES + run.row_start * self._row_bytes)
        except OSError as error:
            lost = f"{type(error).__name__}: {error}"
            return [ShardRecord(name, num_tokens=n, error=lost) for name, n in zip(names, run.lengths, strict=True)]
        shape = sum(run.lengths), len(self._geometry.layer_ids), self._geometry.hidden_size
        states = np.ndarray(shape, dtype="<u2", buffer=data)
        records, row = [], 0
        seen = look_at(states, run.lengths, self._geometry.layer_ids)
        for name, own, n, (fault, moments) in zip(names, ids, run.lengths, seen, strict=True):
            checksum = xxhash.xxh3_64_hexdigest(states[row : row + n].data)
            records.append(ShardRecord(name, run.shard, run.row_start + row, n, checksum, "", fault, moments, own))
            row += n
        return records

    def _write(self, run: _Run, data: memoryview, offset: int) -> None:
        written = 0
        if run.direct >= 0 and offset % BLOCK_BYTES == 0 and _is_aligned(data):
            whole = data[: len(data) // BLOCK_BYTES * BLOCK_BYTES]
            written = len(whole) if self._write_direct(run.direct, whole, offset) else 0
        if rest := data[written:]:
            pwrite_all(run.descriptor, rest, offset + written)
            start_writeback(run.descriptor, offset + written, len(rest))

    def _write_direct(self, descriptor: int, data: memoryview, offset: int) -> bool:
        """Whether that was possible; where it was not once, it is not tried again."""
        try:
            pwrite_all(descriptor, data, offset)
        except OSError as error:
            if error.errno not in _NOT_DIRECT:
                raise
            self._give_up_direct(error)
            return False
        return True

    def _give_up_direct(self, error: OSError) -> None:
        self._may_be_direct = False
        _warn_once(self._folder.stat().st_dev, os.strerror(error.errno or 0))

    @contextlib.contextmanager
    def _allocate(self, lengths: Sequence[int], aligned: bool) -> Iterator[list[_Run]]:
        """Places for sequences of these lengths, those that follow each other in a shard as one run."""
        runs: list[_Run] = []
        with self._lock:
            if aligned and self._may_be_direct:
                rows = self._geometry.rows_of_blocks
                self._rows = math.ceil(self._rows / rows) * rows
            for length in lengths:
                try:
                    end = HEADER_BYTES + (self._rows + length) * self._row_bytes
                    if self._descriptor < 0 or (self._rows and end > self._max_bytes):
                        self._open_next()
                    if not runs or runs[-1].error or runs[-1].shard != self._shard:
                        runs.append(self._new_run())
                    self._rows += length
                except OSError as error:
                    runs.append(_Run(error=error))
                runs[-1].lengths.append(length)
        try:
            yield runs
        finally:
            for run in runs:
                _close(run.descriptor, run.direct)

    def _new_run(self) -> _Run:
        """Descriptors of its own, so that the shard may be left for the next one while a write runs."""
        run = _Run(os.dup(self._descriptor), shard=self._shard, row_start=self._rows)
        if self._direct >= 0 and self._may_be_direct:
            # Without one the page cache does.
            with contextlib.suppress(OSError):
                run.direct = os.dup(self._direct)
        return run

    def _open_next(self) -> None:
        path = self._folder / shard_name(self._shard + 1)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            os.ftruncate(descriptor, HEADER_BYTES)
        except OSError:
            # The next attempt has the same name.
            os.close(descriptor)
            path.unlink()
            raise
        self._close_shard()
        self._descriptor, self._shard, self._rows = descriptor, self._shard + 1, 0
        if self._may_be_direct:
            try:
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno in _NOT_DIRECT:
                    self._give_up_direct(error)

    def _record(self, records: list[ShardRecord]) -> None:
        with self._lock:
            self._unrecorded += records
            lines = self._line_break + "".join(json.dumps(vars(r)) + "\n" for r in self._unrecorded).encode()
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
            _close(self._records)
            self._records = -1

    def _close_shard(self) -> None:
        _close(self._descriptor, self._direct)
        self._descriptor = self._direct = -1


@functools.cache
def _warn_once(disk: int, why: str) -> None:
    _log.warning("hidden states go to disk %d through the page cache, which takes more of the CPU: %s", disk, why)


def _close(*descriptors: int) -> None:
    """Closes all of them, also if one cannot be."""
    with contextlib.ExitStack() as closing:
        for descriptor in descriptors:
            if descriptor >= 0:
                closing.callback(os.close, descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _is_aligned(data: memoryview) -> bool:
    """Whether memory begins at a whole block."""
    return len(data) >= BLOCK_BYTES and np.frombuffer(data, dtype=np.uint8).ctypes.data % BLOCK_BYTES == 0


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Lets the disk write these bytes of a file now, without waiting for it, so that publishing has little to flush.

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
