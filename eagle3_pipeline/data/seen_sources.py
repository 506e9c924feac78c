"""What the last sync saw of each source file, so that a file that did not change is not read again."""

import io
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

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
_SCHEMA = pa.schema([("file", pa.string()), ("stamp", pa.string()), ("key", pa.string()), ("ids", pa.binary())])

# Identities of each chunk's rows, one after the other, by key.
Conversations = dict[str, bytes]


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
        if table.schema.equals(_SCHEMA) and table.schema.metadata.get(_READER) == seen._reader.encode():
            for row in table.to_pylist():
                seen._before[row["file"]] = row["stamp"]
                if row["key"]:
                    seen._keys_before.setdefault(row["file"], []).append(row["key"])
                    seen._conversations[row["key"]] = row["ids"]
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

    def keep(self, conversations: Conversations, files: Mapping[str, str]) -> None:
        """Replaces what is known of all chunks.

        Args:
            conversations: identities of each chunk's rows, by key.
            files: each chunk's file, by key.
        """
        self._conversations, self._files = conversations, dict(files)

    def save(self) -> None:
        """Leaves it to the next sync."""
        rows = [{"file": file, "stamp": stamp, "key": "", "ids": b""} for file, stamp in self.stamps.items()]
        for key, ids in self._conversations.items():
            file = self._files[key]
            rows.append({"file": file, "stamp": self.stamps[file], "key": key, "ids": ids})
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
