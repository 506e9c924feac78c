"""Hidden-state shards: grown by `appender`, sealed by the stage, read memory-mapped.

A shard is a safetensors file: a header region of fixed size, then `hidden_states` [T, A+1, H] bf16, then `input_ids`
[T] i32 (-1 on rows that no sequence owns). While it grows, the header region is zero, so no reader takes it for
finished. One record a sequence goes to `records.jsonl`; the writer process may die at any point.
"""

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from eagle3_pipeline.errors import CaptureError

HEADER_BYTES = 4096
# Memory, offset and length of a write past the page cache are multiples of this, which suits every disk.
BLOCK_BYTES = 4096
RECORDS_NAME = "records.jsonl"
INDEX_NAME = "index.parquet"
# Begins a checksum of a sealed shard that is made of those of its sequences.
OF_ROWS = "rows:"
_READ_BYTES = 2**22
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

    @property
    def rows_of_blocks(self) -> int:
        """The fewest rows that fill whole blocks of the disk."""
        return BLOCK_BYTES // math.gcd(self.row_bytes, BLOCK_BYTES)


@dataclass(frozen=True)
class ShardRecord:
    """What became of one sequence: its place in a shard, or the error that lost it.

    Attributes:
        checksum: xxh3-64 of its rows.
        error: why it is in no shard.
        fault, moments: what its values tell (`values.look_at`).
        ids: `ids_checksum` of the tokens whose states these are; empty: an earlier release wrote it.
    """

    sequence_id: str
    shard: int = -1
    row_start: int = -1
    num_tokens: int = 0
    checksum: str = ""
    error: str = ""
    fault: str = ""
    moments: list[list[float]] = field(default_factory=list)
    ids: str = ""


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def shard_number(path: Path) -> int:
    """The inverse of `shard_name`."""
    return int(path.stem.removeprefix("shard-"))


def seal_shards(
    folder: Path, records: Iterable[ShardRecord], tokens: dict[str, np.ndarray], geometry: Geometry, metadata: dict
) -> pa.Table:
    """Turns grown shards into finished safetensors files and writes the index; publishing flushes them to the disk.

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
    rows = [vars(r) for _, group in ordered for r in sorted(group, key=lambda r: r.row_start)]
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
        pwrite_all(descriptor, memoryview(input_ids.tobytes()), HEADER_BYTES + states_bytes)
        pwrite_all(descriptor, memoryview(struct.pack("<Q", len(text)) + text), 0)
    finally:
        os.close(descriptor)


def pwrite_all(descriptor: int, data: memoryview, offset: int) -> None:
    """Writes all of `data` at this offset of a file."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_index(folder: Path) -> pa.Table:
    """The index of a sealed folder, in the order of shards and rows."""
    return pq.read_table(folder / INDEX_NAME)


def map_states(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Maps a sealed shard without reading it.

    Returns:
        `hidden_states` [T, A+1, H] as raw bf16 bits (uint16), `input_ids` [T] int32.
    """
    with path.open("rb") as file:
        header = _read_header(file)
    shape = tuple(header["hidden_states"]["shape"])
    ids_offset = HEADER_BYTES + header["input_ids"]["data_offsets"][0]
    states = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=shape)
    return states, np.memmap(path, dtype="<i4", mode="r", offset=ids_offset, shape=shape[:1])


def prefetch_rows(path: Path, rows: Iterable[int]) -> None:
    """Has rows of a sealed shard read from the disk, all at once and without waiting for them.

    One after the other, each would wait behind what a busy disk has to write.
    """
    if not hasattr(os, "posix_fadvise"):
        return
    row_bytes = map_states(path)[0].strides[0]
    with path.open("rb") as file:
        for row in rows:
            os.posix_fadvise(file.fileno(), HEADER_BYTES + row * row_bytes, row_bytes, os.POSIX_FADV_WILLNEED)


def _read_header(file: BinaryIO) -> dict:
    """Of a sealed shard.

    Raises:
        ValueError: it is not sealed, or damaged.
    """
    data = file.read(HEADER_BYTES)
    if len(data) != HEADER_BYTES or data[:8] != struct.pack("<Q", HEADER_BYTES - 8):
        raise ValueError(f"{file.name} does not begin with the header of a sealed shard")
    return json.loads(data[8:])


def recorded_checksums(folder: Path) -> dict[str, str]:
    """Checksums of the sealed shards of a folder by file name, from those of their sequences: no row is read."""
    checksums: dict[int, list[str]] = {}
    for row in read_index(folder).to_pylist():
        checksums.setdefault(row["shard"], []).append(row["checksum"])
    return {shard_name(number): _combined(folder / shard_name(number), found) for number, found in checksums.items()}


def read_checksum(path: Path) -> str:
    """The checksum of a sealed shard, all its rows read; of a damaged one or of a damaged index, any exception."""
    row_bytes = map_states(path)[0].strides[0]
    rows = [row for row in read_index(path.parent).to_pylist() if row["shard"] == shard_number(path)]
    return _combined(path, [rows_checksum(path, row["row_start"], row["num_tokens"], row_bytes) for row in rows])


def _combined(path: Path, checksums: list[str]) -> str:
    """xxh3-128 of a shard's header, its input ids and the checksums of its sequences in the order of the index."""
    _, ids = map_states(path)
    with path.open("rb") as file:
        hasher = xxhash.xxh3_128(file.read(HEADER_BYTES))
    hasher.update(ids.tobytes())
    hasher.update(",".join(checksums).encode())
    return OF_ROWS + hasher.hexdigest()


def rows_checksum(path: Path, row_start: int, num_rows: int, row_bytes: int) -> str:
    """xxh3-64 of rows of a shard, or of those that are there; in blocks, since a long sequence may have gigabytes."""
    hasher, left = xxhash.xxh3_64(), num_rows * row_bytes
    with path.open("rb") as file:
        file.seek(HEADER_BYTES + row_start * row_bytes)
        while block := file.read(min(left, _READ_BYTES)):
            hasher.update(block)
            left -= len(block)
    return hasher.hexdigest()


def read_rows(folder: Path, record: ShardRecord, geometry: Geometry) -> np.ndarray:
    """States float32 [n, A+1, H] of a sequence in a folder whose shards still grow."""
    shape = record.num_tokens, len(geometry.layer_ids), geometry.hidden_size
    with (folder / shard_name(record.shard)).open("rb") as file:
        file.seek(HEADER_BYTES + record.row_start * geometry.row_bytes)
        data = file.read(record.num_tokens * geometry.row_bytes)
    return bf16_to_float32(np.frombuffer(data, dtype="<u2").reshape(shape))


def bf16_to_float32(bits: np.ndarray) -> np.ndarray:
    """Raw bf16 bits to float32: bf16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
