"""Reads source rows by range: JSONL files, Parquet files, Hugging Face data sets."""

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.config import DatasetSpec, expand
from eagle3_pipeline.data.row_formats import DuplicateKeyError, unique_keys
from eagle3_pipeline.data.table_rows import TableRow, named_columns, parquet_paths, restrict, spell, spell_as_0_1_0
from eagle3_pipeline.errors import DataError, with_causes
from eagle3_pipeline.store.fingerprint import canonical_json

_BLOCK_BYTES = 1 << 20
_RAW_LIMIT = 4096


@dataclass(frozen=True)
class RawRow:
    """One row as it was found.

    Attributes:
        number: position in its file, from 0.
        byte_start: offset of the row in a JSONL file, else 0.
        value: the decoded row, if it is a JSON object.
        reason: why there is no value, else "".
        raw: the first characters of the row, for `rejected.parquet`.
        digest: 16 bytes that identify the row's content.
    """

    number: int
    byte_start: int
    value: dict[str, Any] | None
    reason: str
    raw: str
    digest: bytes


def source_files(spec: DatasetSpec) -> list[Path]:
    """Files that the glob matches, sorted by name.

    Raises:
        DataError: none matches, or one is neither JSONL nor Parquet.
    """
    pattern = expand(spec.path)
    files = sorted(Path(p) for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
    if not files:
        raise DataError(f"dataset.path {pattern} matches no file")
    for path in files:
        if path.suffix not in (".jsonl", ".parquet"):
            raise DataError(
                f"dataset.path matches {path}; only .jsonl and .parquet files are read. For .json, .csv and others "
                "give dataset.source: huggingface, and their folder as dataset.path"
            )
    return files


def read_rows(
    spec: DatasetSpec,
    file: str,
    start: int = 0,
    byte_start: int = 0,
    count: int | None = None,
    as_0_1_0: bool = False,
) -> Iterator[RawRow]:
    """Rows `start .. start+count` of one source file (or of the Hugging Face data set `file`).

    Of a table only the columns that `spec` names are read.

    Args:
        spec: where and how to read.
        file: path of the file, or the data set's name.
        start: first row.
        byte_start: its offset, for JSONL.
        count: how many; `None`: to the end.
        as_0_1_0: read all columns of tables, and make digests of them as release 0.1.0 did.

    Raises:
        DataError: the file cannot be read at all.
    """
    try:
        if spec.source == "huggingface":
            yield from _huggingface_rows(spec, start, count, as_0_1_0)
        elif file.endswith(".parquet"):
            yield from _parquet_rows(spec, Path(file), start, count, as_0_1_0)
        else:
            yield from _jsonl_rows(Path(file), start, byte_start, count, spec.max_row_bytes)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        gone = "; if it was moved or removed, run eagle3 sync-chunks" if isinstance(error, FileNotFoundError) else ""
        raise DataError(f"cannot read {file}: {with_causes(error)}{gone}") from error


def _jsonl_rows(path: Path, number: int, byte_start: int, count: int | None, limit: int) -> Iterator[RawRow]:
    end = None if count is None else number + count
    with path.open("rb") as stream:
        stream.seek(byte_start)
        while end is None or number < end:
            line_start = stream.tell()
            line, head, digest = _read_line(stream, limit)
            if digest is None:
                return
            value, reason = (None, "row_too_long") if line is None else _decode(line)
            yield RawRow(number, line_start, value, reason, head.decode("utf-8", "replace"), digest)
            number += 1


def _read_line(stream: Any, limit: int) -> tuple[bytes | None, bytes, bytes | None]:
    """The next line (`None` if longer than `limit`), its beginning, and its digest (`None` at the end of the file)."""
    hasher = hashlib.blake2b(digest_size=16)
    parts: list[bytes] = []
    size, head = 0, b""
    while block := stream.readline(_BLOCK_BYTES):
        hasher.update(block.rstrip(b"\r\n") if block.endswith(b"\n") else block)
        head = head or block[:_RAW_LIMIT]
        size += len(block)
        if size <= limit:
            parts.append(block)
        if block.endswith(b"\n"):
            break
    if not size:
        return None, head, None
    return (b"".join(parts) if size <= limit else None), head, hasher.digest()


def _decode(line: bytes) -> tuple[dict[str, Any] | None, str]:
    if not line.strip():
        return None, "empty"
    try:
        # As text: from bytes, UTF-16 would be guessed for some of a UTF-16 file's lines.
        value = json.loads(line.decode("utf-8-sig"), object_pairs_hook=unique_keys)
    except DuplicateKeyError:
        return None, "duplicate_key"
    except (ValueError, RecursionError):
        return None, "bad_json"
    return (value, "") if isinstance(value, dict) else (None, "not_an_object")


def _parquet_rows(spec: DatasetSpec, path: Path, start: int, count: int | None, as_0_1_0: bool) -> Iterator[RawRow]:
    try:
        file = pq.ParquetFile(path)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        _require_content_error(error)
        # One file that is no Parquet must not hide the others: it is a row that is rejected.
        if start == 0 and count != 0:
            yield _unreadable(0, "unreadable_file", f"{path.stat().st_size} bytes: {error}")
        return
    present = schema.names
    named = named_columns(spec.columns, present)
    columns = None if as_0_1_0 else parquet_paths(schema, named)
    number = 0
    end = file.metadata.num_rows if count is None else min(start + count, file.metadata.num_rows)
    for group in range(file.metadata.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if number + size > start and number < end:
            position = number
            try:
                for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=columns):
                    for value in _batch_values(batch, None if as_0_1_0 else "strict"):
                        if start <= position < end:
                            yield _table_row(position, value, spec, None if as_0_1_0 else named, present)
                        position += 1
            except (pa.ArrowException, OSError) as error:
                _require_content_error(error)
                for broken in range(max(start, position), min(end, number + size)):
                    yield _unreadable(broken, "unreadable_row", f"row group {group}: {error}")
        number += size


def _require_content_error(error: Exception) -> None:
    """Raises an error of the file system. Arrow calls damaged contents an OSError, too, but without a number."""
    if isinstance(error, OSError) and error.errno:
        raise error


def _batch_values(batch: pa.RecordBatch, maps: Literal["strict"] | None) -> Iterator[dict[str, Any] | Exception]:
    """Rows of a batch; a row with a value that Python does not know (invalid text, a year 300,000) is an error.

    Args:
        batch: the rows.
        maps: how Arrow's maps are read: as objects ("strict": one that names a key twice is an error), else as pairs.
    """
    try:
        values = batch.to_pylist(maps_as_pydicts=maps)
    except Exception:  # each kind of value has its own
        values = None
    if values is not None:
        yield from values
        return
    for i in range(batch.num_rows):
        try:
            value = batch.slice(i, 1).to_pylist(maps_as_pydicts=maps)[0]
        except Exception as error:  # as above
            value = error
        yield value


def _unreadable(number: int, reason: str, detail: str) -> RawRow:
    digest = hashlib.blake2b(detail.encode("utf-8", "replace"), digest_size=16).digest()
    return RawRow(number, 0, None, reason, detail[:_RAW_LIMIT], digest)


def _huggingface_rows(spec: DatasetSpec, start: int, count: int | None, as_0_1_0: bool) -> Iterator[RawRow]:
    data = open_huggingface(spec)
    present = data.column_names
    named = named_columns(spec.columns, present)
    if not as_0_1_0:
        data = _undecoded(data, list(named))
    end = len(data) if count is None else min(start + count, len(data))
    for number in range(start, end):
        try:
            value = data[number]
        except Exception as error:  # as of a Parquet file's values
            value = error
        yield _table_row(number, value, spec, None if as_0_1_0 else named, present)


def _undecoded(data: Any, names: list[str]) -> Any:
    """These columns of a Hugging Face data set; images and the like in them stay bytes."""
    import copy

    # Without any column there would be no rows.
    found = copy.deepcopy(data.select_columns(names or data.column_names[:1]).with_format(None))
    for name, feature in list(found.features.items()):
        found._info.features[name] = _as_bytes(feature)
    return found


def _as_bytes(feature: Any) -> Any:
    import copy

    if isinstance(feature, dict):
        return type(feature)({name: _as_bytes(inner) for name, inner in feature.items()})
    if isinstance(feature, list | tuple):
        return type(feature)(_as_bytes(inner) for inner in feature)
    found = copy.copy(feature)
    if getattr(feature, "decode", None) is True:
        found.decode = False
    elif hasattr(feature, "feature"):
        found.feature = _as_bytes(feature.feature)
    return found


def open_huggingface(spec: DatasetSpec) -> Any:
    """The data set behind a Hugging Face id, a folder of data files, or a `save_to_disk` folder.

    Raises:
        DataError: it cannot be loaded.
    """
    import datasets

    path = expand(spec.path)
    try:
        if (Path(path) / "dataset_info.json").exists() or (Path(path) / "dataset_dict.json").exists():
            data = datasets.load_from_disk(path)
            return data[spec.split] if isinstance(data, datasets.DatasetDict) else data
        return datasets.load_dataset(path, spec.subset, split=spec.split)
    except Exception as error:  # `datasets` raises many unrelated types for a source that cannot be had
        raise DataError(
            f"cannot load the Hugging Face data set {path!r} (split {spec.split!r}): {with_causes(error)}"
        ) from error


def _table_row(
    number: int,
    value: dict[str, Any] | Exception,
    spec: DatasetSpec,
    named: dict[str, list[str]] | None,
    present: list[str],
) -> RawRow:
    """A row of its named columns; `named` is `None`: of all, as 0.1.0 read it."""
    if isinstance(value, UnicodeDecodeError):
        return _unreadable(number, "invalid_text", f"{value}: {value.object[:_RAW_LIMIT]!r}")
    if isinstance(value, Exception):
        return _unreadable(number, "unreadable_row", f"{type(value).__name__}: {value}")
    row = TableRow(value) if named is None else restrict(value, named, present)
    raw = canonical_json(spell_as_0_1_0(value) if named is None else spell(row))
    kept, reason = (None, "row_too_long") if len(raw) > spec.max_row_bytes else (row, "")
    head, digest = raw[:_RAW_LIMIT].decode("utf-8", "replace"), hashlib.blake2b(raw, digest_size=16).digest()
    return RawRow(number, 0, kept, reason, head, digest)
