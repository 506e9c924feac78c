"""The chunk registry: which rows of which file a chunk is. Chunks are appended, never removed or renumbered."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice, pairwise, repeat
from pathlib import Path

from eagle3_pipeline.config import DatasetSpec, PipelineSpec, expand
from eagle3_pipeline.data.sources import RawRow, read_rows, source_files
from eagle3_pipeline.errors import DataError, StoreError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.fingerprint import digest

REGISTRY_NAME = "chunks.jsonl"


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
        duplicate_rows: rows (numbers in the file) whose content an earlier row already had.
    """

    key: str
    file: str
    row_start: int
    num_rows: int
    byte_start: int
    content_hash: str
    duplicate_rows: tuple[int, ...] = ()

    @property
    def content_id(self) -> str:
        """Identity of what the chunk holds; independent of where the file lies."""
        offsets = [row - self.row_start for row in self.duplicate_rows]
        return digest({"rows": self.content_hash, "num_rows": self.num_rows, "duplicates": offsets})

    def check_content(self, digests: list[bytes]) -> None:
        """Compares the rows' digests with the registered content.

        Raises:
            DataError: the file changed since the last sync.
        """
        if len(digests) != self.num_rows or _content_hash(digests) != self.content_hash:
            raise DataError(
                f"chunk {self.key}: {self.file} changed since the chunk was registered "
                f"({len(digests)} rows found, {self.num_rows} registered); run eagle3 sync-chunks"
            )


@dataclass(frozen=True)
class SyncResult:
    """What a sync found."""

    added: list[str]
    changed: list[str]
    unchanged: list[str]


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
        if not self._path.exists():
            return []
        try:
            rows = [json.loads(line) for line in self._path.read_bytes().splitlines()]
            return [Chunk(**{**row, "duplicate_rows": tuple(row["duplicate_rows"])}) for row in rows]
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"chunk registry {self._path} is damaged: {error}") from error

    def chunk(self, key: str) -> Chunk:
        """The chunk of this key.

        Raises:
            StoreError: there is none.
        """
        for chunk in self.chunks():
            if chunk.key == key:
                return chunk
        raise StoreError(f"chunk {key} is not in {self._path}; run eagle3 sync-chunks")

    def sync(self, spec: PipelineSpec) -> SyncResult:
        """Compares the source with the registry and appends what is new; serial, under a lock."""
        with atomic.exclusive(self._folder / "chunks.lock", f"chunk registry of {spec.name}", wait=True):
            old = self.chunks()
            new = _scan(spec.dataset, old)
            lines = "".join(json.dumps(asdict(chunk)) + "\n" for chunk in new)
            if new != old:
                atomic.write_bytes(self._path, lines.encode())
        before = {chunk.key: chunk.content_id for chunk in old}
        return SyncResult(
            added=[c.key for c in new if c.key not in before],
            changed=[c.key for c in new if before.get(c.key, c.content_id) != c.content_id],
            unchanged=[c.key for c in new if before.get(c.key) == c.content_id],
        )


def _scan(spec: DatasetSpec, old: list[Chunk]) -> list[Chunk]:
    """The registry after a look at the source: known chunks in their places, new ones behind them."""
    files = [expand(spec.path)] if spec.source == "huggingface" else [str(p) for p in source_files(spec)]
    known: dict[str, list[Chunk]] = {}
    for chunk in old:
        known.setdefault(chunk.file, []).append(chunk)
    # Files of known chunks come first, in the order in which they were registered, so that "the first occurrence
    # of a row wins" never moves a row from an old chunk to a new one.
    ordered = [f for f in known if f in files] + [f for f in files if f not in known]
    seen: set[bytes] = set()
    by_key: dict[str, Chunk] = {}
    next_key = len(old)
    left = spec.max_samples
    for file in ordered:
        rows = iter(read_rows(spec, file))
        if left is not None:
            rows = islice(rows, left)
        for previous, found in _cut(file, rows, known.get(file, []), spec.samples_per_chunk, seen):
            key = previous.key if previous else f"{next_key:06d}"
            next_key += previous is None
            by_key[key] = replace(found, key=key)
            left = None if left is None else left - found.num_rows
    gone = [replace(c, num_rows=0, content_hash="", duplicate_rows=()) for c in old if c.key not in by_key]
    return sorted([*by_key.values(), *gone], key=lambda c: c.key)


def _cut(
    file: str, rows: Iterator[RawRow], known: list[Chunk], size: int, seen: set[bytes]
) -> Iterator[tuple[Chunk | None, Chunk]]:
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
        yield previous, _describe(file, block, seen)


def _describe(file: str, rows: list[RawRow], seen: set[bytes]) -> Chunk:
    duplicates = []
    for row in rows:
        if row.digest in seen:
            duplicates.append(row.number)
        seen.add(row.digest)
    first = rows[0]
    return Chunk(
        "",
        file,
        first.number,
        len(rows),
        first.byte_start,
        _content_hash([row.digest for row in rows]),
        tuple(duplicates),
    )


def _content_hash(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()[:32]
