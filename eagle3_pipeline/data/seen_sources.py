"""What the last sync saw of each source file, so that a file that did not change is not read again."""

import io
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.config import DatasetSpec, expand
from eagle3_pipeline.data.sources import open_huggingface, source_files
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.fingerprint import digest

if TYPE_CHECKING:
    from eagle3_pipeline.data.registry import Chunk

# Identity of a conversation; all zero: the row gives none.
ID_BYTES = 16
UNUSABLE = bytes(ID_BYTES)
# A file written twice within the clock tick of its volume has one time of change; one that is this old has not.
_SETTLED_S = 2.0
_READER = b"reader"
_SCHEMA = pa.schema(
    [("file", pa.string()), ("stamp", pa.string()), ("key", pa.string()), ("ids", pa.binary()), ("turns", pa.binary())]
)
_TURN = np.dtype([("turn", "<u4"), ("id", "V16")])
_PLACED_TURN = np.dtype([("row", "<u4"), *[(name, _TURN[name]) for name in ("turn", "id")]])

# Identities of each chunk's rows, one after the other, by key.
Conversations = dict[str, bytes]


def join_turns(rows: Iterable[bytes]) -> bytes:
    """User turns of a chunk's rows, given as (turn: 4 bytes, identity: 16), each with its row's position before it."""
    parts = []
    for row, turns in enumerate(rows):
        found = np.frombuffer(turns, dtype=_TURN)
        placed = np.zeros(len(found), dtype=_PLACED_TURN)
        placed["row"], placed["turn"], placed["id"] = row, found["turn"], found["id"]
        parts.append(placed.tobytes())
    return b"".join(parts)


def split_turns(joined: bytes) -> np.ndarray:
    """A structured array [number of turns] of row, turn, id; the inverse of `join_turns`."""
    return np.frombuffer(joined, dtype=_PLACED_TURN)


class SeenSources:
    """Stamps of the source's files, then and now, and the conversations of each chunk.

    Attributes:
        stamps: the files that are there now, in order, each with what tells its versions apart; empty: not yet known.
        unread: files that are to be read by the next sync.
    """

    def __init__(self, path: Path, reader: str, stamps: dict[str, str]) -> None:
        self.stamps = stamps
        self.unread: list[str] = []
        self._path = path
        self._reader = reader
        self._before: dict[str, str] = {}
        self._keys_before: dict[str, list[str]] = {}
        self._conversations: Conversations = {}
        self._turns: dict[str, bytes] = {}
        self._files: dict[str, str] = {}

    @classmethod
    def load(cls, path: Path, spec: DatasetSpec) -> "SeenSources":
        """Looks at the source and at what the last sync left.

        Raises:
            DataError: the source cannot be found.
        """
        seen = cls(path, _reader_id(spec), _stamps(spec))
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowException):
            return seen
        # An earlier release did not look at turns: its files are read once more.
        known = table.schema.equals(_SCHEMA) or table.schema.equals(_SCHEMA.remove(_SCHEMA.names.index("turns")))
        if known and table.schema.metadata.get(_READER) == seen._reader.encode():
            for row in table.to_pylist():
                seen._before[row["file"]] = row["stamp"] if "turns" in row else ""
                if row["key"]:
                    seen._keys_before.setdefault(row["file"], []).append(row["key"])
                    seen._conversations[row["key"]] = row["ids"]
                    seen._turns[row["key"]] = row.get("turns", b"")
        return seen

    def nothing_changed(self, chunks: list["Chunk"]) -> bool:
        """Whether the source is as the last sync left it, and that sync's registry is this one."""
        keys = {chunk.key for chunk in chunks if chunk.num_rows}
        return all(self.stamps.values()) and self.stamps == self._before and keys == set(self._conversations)

    def conversations(self, file: str, chunks: list["Chunk"], late: bool = False) -> Conversations | None:
        """Conversations of a file's chunks, by key; `None` if the file has to be read.

        Args:
            file: the file.
            chunks: its chunks.
            late: there is no time to read it: it stays as it was, and is left for the next sync.
        """
        stamp, keys = self.stamps.get(file), sorted(chunk.key for chunk in chunks if chunk.num_rows)
        # Another registry than that sync's.
        if keys != sorted(self._keys_before.get(file, [])):
            return None
        if not stamp or self._before.get(file) != stamp:
            if not late:
                return None
            self.stamps[file] = ""
            self.unread.append(file)
        return {key: self._conversations[key] for key in keys}

    def turns(self, keys: Iterable[str]) -> dict[str, bytes]:
        """User turns of chunks, as `join_turns`, by key."""
        return {key: self._turns[key] for key in keys}

    def keep(self, conversations: Conversations, turns: dict[str, bytes], files: Mapping[str, str]) -> None:
        """Replaces what is known of all chunks.

        Args:
            conversations: identities of each chunk's rows, by key.
            turns: their user turns, as `join_turns`, by key.
            files: each chunk's file, by key.
        """
        self._conversations, self._turns, self._files = conversations, turns, dict(files)

    def save(self) -> None:
        """Leaves it to the next sync."""
        nothing = {"key": "", "ids": b"", "turns": b""}
        rows = [{"file": file, "stamp": stamp, **nothing} for file, stamp in self.stamps.items()]
        for key, ids in self._conversations.items():
            file = self._files[key]
            turns = self._turns[key]
            rows.append({"file": file, "stamp": self.stamps[file], "key": key, "ids": ids, "turns": turns})
        table = pa.Table.from_pylist(rows, _SCHEMA.with_metadata({_READER: self._reader.encode()}))
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        atomic.write_bytes(self._path, buffer.getvalue())


def read_otherwise(path: Path, spec: DatasetSpec) -> bool:
    """Whether the last sync, whose notes lie at `path`, read the source with other settings than these."""
    try:
        metadata = pq.read_schema(path).metadata or {}
    except (OSError, pa.ArrowException):
        return False
    return metadata.get(_READER) != _reader_id(spec).encode()


def _reader_id(spec: DatasetSpec) -> str:
    return digest(spec.described(exclude={"min_yield", "decontaminate"}))


def _stamps(spec: DatasetSpec) -> dict[str, str]:
    if spec.source == "huggingface":
        data = open_huggingface(spec)
        return {expand(spec.path): json.dumps([len(data), data._fingerprint])}
    settled = time.time() - _SETTLED_S
    return {str(path): _stamp(os.stat(path), settled) for path in source_files(spec)}


def _stamp(found: os.stat_result, settled: float) -> str:
    return json.dumps([found.st_size, found.st_mtime_ns, found.st_ino]) if found.st_mtime < settled else ""
