"""The chunk registry: which rows of which file a chunk is. Chunks are appended, never removed or renumbered."""

import hashlib
import json
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle3_pipeline.config import DatasetSpec, PipelineSpec
from eagle3_pipeline.data.conversations import conversation_id, normalise, prompt_ids
from eagle3_pipeline.data.seen_sources import (
    ID_BYTES,
    UNUSABLE,
    SeenSources,
    join_turns,
    read_otherwise,
    split_turns,
)
from eagle3_pipeline.data.sources import RawRow, read_rows
from eagle3_pipeline.errors import DataError, StaleInputError, StoreError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.fingerprint import digest

REGISTRY_NAME = "chunks.jsonl"
SEEN_NAME = "seen_sources.parquet"


@dataclass(frozen=True)
class Chunk:
    """One chunk of the source.

    Attributes:
        key: the Dagster partition key, zero-padded.
        file: path of the source file, or the Hugging Face data set's name.
        row_start: first row.
        num_rows: rows; 0 once the file no longer has them.
        byte_start: offset of the first row, for JSONL.
        content_hash: hash of the rows' content.
        duplicate_rows: rows (numbers in the file) whose conversation an earlier row already had.
        duplicate_turns: (row, turn) of the other rows' user turns that an earlier chunk already asks for, with the same
            turns before. `None`: a release registered the chunk that did not look; it keeps all of them.
        num_own_turns: user turns that no earlier chunk asks for. `None`: as above.
    """

    key: str
    file: str
    row_start: int
    num_rows: int
    byte_start: int
    content_hash: str
    duplicate_rows: tuple[int, ...] = ()
    duplicate_turns: tuple[tuple[int, int], ...] | None = None
    num_own_turns: int | None = None

    @property
    def repeated_turns_id(self) -> str:
        """Identity of `duplicate_turns`; empty: there is none."""
        turns = [[row - self.row_start, turn] for row, turn in self.duplicate_turns or ()]
        return digest(turns) if turns else ""

    @property
    def has_prompts(self) -> bool:
        """Whether the verifier has anything to answer anew that it does not answer in an earlier chunk."""
        return not self.duplicate_turns or self.num_own_turns != 0

    @property
    def has_work(self) -> bool:
        """Whether any of its rows is not a duplicate of an earlier one."""
        return self.num_rows > len(self.duplicate_rows)

    @property
    def content_id(self) -> str:
        """Identity of what the chunk holds; independent of where the file lies."""
        offsets = [row - self.row_start for row in self.duplicate_rows]
        return digest({"rows": self.content_hash, "num_rows": self.num_rows, "duplicates": offsets})

    def holds(self, digests: list[bytes]) -> bool:
        """Whether rows of these digests are the registered content."""
        return len(digests) == self.num_rows and _content_hash(digests) == self.content_hash

    def check_content(self, digests: list[bytes], spec: DatasetSpec | None = None) -> None:
        """Compares the rows' digests with the registered content.

        Args:
            digests: of the rows as they are read now.
            spec: to read the rows once more as release 0.1.0 did, which may have registered them.

        Raises:
            DataError: the file changed since the last sync.
        """
        if not self.holds(digests) and not (spec and self._held_by_0_1_0(spec)):
            raise DataError(
                f"chunk {self.key}: {self.file} changed since the chunk was registered "
                f"({len(digests)} rows found, {self.num_rows} registered); run eagle3 sync-chunks"
            )

    def _held_by_0_1_0(self, spec: DatasetSpec) -> bool:
        """Whether the rows are the registered content as release 0.1.0 saw it: of all columns, not the named ones."""
        if self.file.endswith(".jsonl") or not self.num_rows:
            return False
        rows = read_rows(spec, self.file, self.row_start, self.byte_start, self.num_rows, as_0_1_0=True)
        return self.holds([row.digest for row in rows])


@dataclass(frozen=True)
class SyncResult:
    """What a sync found.

    Attributes:
        added: keys of new chunks.
        changed: keys of chunks with other content than before.
        unchanged: the others.
        gone: keys of chunks, among the changed ones, whose rows the source does not have any more.
        num_unread: new or changed files that are left for the next sync, for want of time.
    """

    added: list[str]
    changed: list[str]
    unchanged: list[str]
    num_unread: int = 0
    gone: list[str] = field(default_factory=list)


class ChunkRegistry:
    """The chunks of one pipeline, in order of their keys."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self._folder = root / "pipelines" / pipeline
        self._path = self._folder / REGISTRY_NAME

    def chunks(self) -> list[Chunk]:
        """All chunks.

        Raises:
            StoreError: the registry is damaged.
        """
        return self._parse(self._path.read_bytes().splitlines()) if self._path.exists() else []

    def chunks_with_work(self) -> list[Chunk]:
        """Chunks that hold rows which no earlier chunk holds.

        Raises:
            StoreError: the registry is damaged.
        """
        return [chunk for chunk in self.chunks() if chunk.has_work]

    def chunk(self, key: str) -> Chunk:
        """The chunk of this key.

        Raises:
            StoreError: there is none.
        """
        # One line of possibly ten thousand: `asdict` writes the key first.
        start = f'{{"key": {json.dumps(key)},'.encode()
        lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        for line in lines:
            if line.startswith(start):
                return self._parse([line])[0]
        raise StoreError(f"chunk {key} is not in {self._path}; run eagle3 sync-chunks")

    def require_synced(self, spec: PipelineSpec) -> None:
        """Which rows are duplicates was decided with the settings of the last sync; others ask for another one.

        Raises:
            StaleInputError: settings of `dataset` changed since.
        """
        if read_otherwise(self._folder / SEEN_NAME, spec.dataset):
            raise StaleInputError(
                f"{spec.name}: keys of `dataset` (path, format, columns, filters, ...) changed since the chunks were "
                f"registered; run eagle3 sync-chunks {spec.name}"
            )

    def _parse(self, lines: list[bytes]) -> list[Chunk]:
        try:
            rows = [json.loads(line) for line in lines]
            return [_read_chunk(row) for row in rows]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"chunk registry {self._path} is damaged: {error}; restore it, or remove it and run eagle3 sync-chunks "
                "(chunks keep their keys if the files are still there in the same order)"
            ) from error

    def sync(self, spec: PipelineSpec, read_for_s: float = math.inf) -> SyncResult:
        """Compares the source with the registry and appends what is new; serial, under a lock.

        Args:
            spec: the pipeline.
            read_for_s: no further file is read after this time; the next sync goes on.
        """
        with atomic.exclusive(self._folder / "chunks.lock", f"chunk registry of {spec.name}", wait=True):
            old = self.chunks()
            seen = SeenSources.load(self._folder / SEEN_NAME, spec.dataset)
            deadline = time.monotonic() + read_for_s
            new = old if seen.nothing_changed(old) else self._rescan(spec.dataset, old, seen, deadline)
        before = {chunk.key: chunk.content_id for chunk in old}
        return SyncResult(
            added=[c.key for c in new if c.key not in before],
            changed=[c.key for c in new if before.get(c.key, c.content_id) != c.content_id],
            unchanged=[c.key for c in new if before.get(c.key) == c.content_id],
            num_unread=len(seen.unread),
            gone=[c.key for c in new if not c.num_rows and before.get(c.key, c.content_id) != c.content_id],
        )

    def _rescan(self, spec: DatasetSpec, old: list[Chunk], seen: SeenSources, deadline: float) -> list[Chunk]:
        new = _scan(spec, old, seen, deadline)
        lines = "".join(json.dumps(_as_line(chunk)) + "\n" for chunk in new)
        if new != old:
            atomic.write_bytes(self._path, lines.encode())
        seen.save()
        return new


def _read_chunk(row: dict[str, Any]) -> Chunk:
    read: dict[str, Any] = {**row, "duplicate_rows": tuple(row["duplicate_rows"])}
    if "duplicate_turns" in row:
        read["duplicate_turns"] = tuple((number, turn) for number, turn in row["duplicate_turns"])
    return Chunk(**read)


def _as_line(chunk: Chunk) -> dict[str, Any]:
    """A chunk as its line of the registry; what an earlier release did not look for is not there either."""
    return {key: value for key, value in asdict(chunk).items() if value is not None}


class _Row(NamedTuple):
    """What the registry keeps of a row: its place, its digest, the identities of its conversation and user turns."""

    number: int
    byte_start: int
    digest: bytes
    conversation: bytes
    turns: bytes


def _scan(spec: DatasetSpec, old: list[Chunk], seen: SeenSources, deadline: float) -> list[Chunk]:
    """The registry after a look at the source: known chunks in their places, new ones behind them."""
    files = list(seen.stamps)
    known: dict[str, list[Chunk]] = {file: [] for file in files}
    for chunk in old:
        known.setdefault(chunk.file, []).append(chunk)
    # Files of known chunks come first, in the order in which they were registered, so that `max_samples` never takes
    # a row from an old chunk for a new one.
    registered = [f for f in dict.fromkeys(c.file for c in old) if f in set(files)]
    ordered = list(dict.fromkeys([*registered, *files]))
    budget = _Budget(spec.max_samples, {file: sum(c.num_rows for c in known[file]) for file in ordered})
    by_key: dict[str, Chunk] = {}
    conversations: dict[str, bytes] = {}
    turns: dict[str, bytes] = {}
    next_key = len(old)
    some_read = False
    for file in ordered:
        # A limit on all samples makes what one file may give depend on the others.
        if spec.max_samples is None:
            cached = seen.conversations(file, known[file], late=some_read and time.monotonic() > deadline)
            if cached is not None:
                by_key |= {chunk.key: chunk for chunk in known[file] if chunk.key in cached}
                conversations |= cached
                turns |= seen.turns(cached)
                continue
        some_read = True
        # What is read is let go of at once: a chunk of long rows need not fit into memory here.
        rows = (_scan_row(row, spec) for row in islice(read_rows(spec, file), budget.open(file)))
        for previous, block in _cut(rows, known[file], spec.samples_per_chunk):
            key = previous.key if previous else f"{next_key:06d}"
            next_key += previous is None
            by_key[key] = _as_registered(previous, _describe(key, file, block), spec)
            conversations[key] = b"".join(row.conversation for row in block)
            turns[key] = join_turns(row.turns for row in block)
            budget.spend(len(block))
    by_key = _mark_duplicates(by_key, conversations)
    by_key = _mark_turns(by_key, turns, {chunk.key: chunk for chunk in old})
    seen.keep(conversations, turns, {key: chunk.file for key, chunk in by_key.items()})
    nothing: dict[str, Any] = {"duplicate_rows": (), "duplicate_turns": None, "num_own_turns": None}
    gone = [replace(c, num_rows=0, content_hash="", **nothing) for c in old if c.key not in by_key]
    return sorted([*by_key.values(), *gone], key=lambda c: c.key)


class _Budget:
    """Shares `max_samples` among files: what a file had before, and what later files' chunks leave over."""

    def __init__(self, limit: int | None, registered: dict[str, int]) -> None:
        self._left = limit
        self._registered = registered

    def open(self, file: str) -> int | None:
        """Rows that this file may give; files come one after the other."""
        own = self._registered.pop(file)
        if self._left is None:
            return None
        return max(min(own, self._left), self._left - sum(self._registered.values()))

    def spend(self, num_rows: int) -> None:
        if self._left is not None:
            self._left -= num_rows


def _cut(rows: Iterator[_Row], known: list[Chunk], size: int) -> Iterator[tuple[Chunk | None, list[_Row]]]:
    """Cuts a file's rows into its known chunks (by their starts) and then into new ones of `size` rows."""
    known = sorted(known, key=lambda c: c.row_start)
    limits = [after.row_start - before.row_start for before, after in pairwise(known)]
    if known:
        limits.append(max(size, known[-1].num_rows))
    plan: Iterable[tuple[Chunk | None, int]] = chain(zip(known, limits, strict=True), repeat((None, size)))
    for previous, limit in plan:
        block = list(islice(rows, limit))
        if not block:
            return
        yield previous, block


def _describe(key: str, file: str, rows: list[_Row]) -> Chunk:
    first = rows[0]
    return Chunk(key, file, first.number, len(rows), first.byte_start, _content_hash([row.digest for row in rows]))


def _as_registered(previous: Chunk | None, found: Chunk, spec: DatasetSpec) -> Chunk:
    """What was found, with the hash that release 0.1.0 registered if the rows are still those."""
    if previous is None or previous.content_hash == found.content_hash or previous.num_rows != found.num_rows:
        return found
    same = replace(found, content_hash=previous.content_hash)
    return same if same._held_by_0_1_0(spec) else found


def _scan_row(row: RawRow, spec: DatasetSpec) -> _Row:
    """What the registry keeps of a row. Ids and other columns do not make a conversation another one."""
    messages = None if row.value is None else normalise(row.value, spec)
    if not isinstance(messages, list):
        return _Row(row.number, row.byte_start, row.digest, UNUSABLE, b"")
    turns = b"".join(turn.to_bytes(4, "little") + identity for turn, identity in prompt_ids(messages))
    return _Row(row.number, row.byte_start, row.digest, bytes.fromhex(conversation_id(messages)), turns)


def _mark_turns(chunks: dict[str, Chunk], turns: dict[str, bytes], old: dict[str, Chunk]) -> dict[str, Chunk]:
    """Marks the user turns that an earlier chunk asks for; in the order of keys, as `_mark_duplicates`.

    A chunk that an earlier release registered stays as it is: what was generated for it is not to become stale.
    """
    keys = sorted(chunks)
    parts = {key: split_turns(turns[key]) for key in keys}
    found: dict[str, Chunk] = {}
    # Places are (row of the chunk, turn); rows that are duplicates as a whole ask for nothing.
    own = {
        key: parts[key][~np.isin(parts[key]["row"], np.subtract(chunks[key].duplicate_rows, chunks[key].row_start))]
        for key in keys
    }
    identities = np.concatenate([part["id"] for part in own.values()]) if keys else np.zeros(0, dtype="V16")
    chunk_of = np.repeat(np.arange(len(keys)), [len(own[key]) for key in keys])
    pairs = np.frombuffer(identities.tobytes(), dtype="<i8").reshape(-1, 2)
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))  # stable: the first of equal ones is that of the first chunk
    ranked = pairs[order]
    begins = np.ones(len(order), dtype=bool)
    begins[1:] = (ranked[1:] != ranked[:-1]).any(axis=1)
    first = chunk_of[order][np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))] if len(order) else order
    is_earlier = np.zeros(len(order), dtype=bool)
    is_earlier[order] = first < chunk_of[order]
    start = 0
    for key in keys:
        chunk, part = chunks[key], own[key]
        mask, start = is_earlier[start : start + len(part)], start + len(part)
        before = old.get(key)
        if before and before.duplicate_turns is None and before.content_hash == chunk.content_hash:
            found[key] = replace(chunk, duplicate_turns=None, num_own_turns=None)
            continue
        places = part[mask]
        marked = tuple((row + chunk.row_start, turn) for row, turn in places[["row", "turn"]].tolist())
        found[key] = replace(chunk, duplicate_turns=marked, num_own_turns=int((~mask).sum()))
    return found


def _mark_duplicates(chunks: dict[str, Chunk], conversations: dict[str, bytes]) -> dict[str, Chunk]:
    """Marks the rows whose conversation an earlier row has.

    In the order of keys, so that "the first occurrence wins" never takes a conversation from an old chunk.
    """
    keys = sorted(chunks)
    # int64 [N, 2]: an identity is 16 bytes.
    identities = np.frombuffer(b"".join(conversations[key] for key in keys), dtype="<i8").reshape(-1, 2)
    order = np.lexsort((identities[:, 1], identities[:, 0]))  # stable: equal ones stay in the order of rows
    ranked = identities[order]
    is_duplicate = np.zeros(len(order), dtype=bool)
    is_duplicate[order[1:]] = (ranked[1:] == ranked[:-1]).all(axis=1) & ranked[1:].any(axis=1)
    found: dict[str, Chunk] = {}
    start = 0
    for key in keys:
        chunk = chunks[key]
        end = start + len(conversations[key]) // ID_BYTES
        rows = np.flatnonzero(is_duplicate[start:end]) + chunk.row_start
        found[key] = replace(chunk, duplicate_rows=tuple(rows.tolist()))
        start = end
    return found


def _content_hash(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]
