"""Identities: canonical JSON, fingerprints of stages, content ids of tables."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash


def canonical_json(value: Any) -> bytes:
    """The one spelling of a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def digest(value: Any) -> str:
    """sha256 of the canonical JSON, 32 hex digits."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:32]


def fingerprint(stage: str, format_version: int, spec: dict[str, Any], inputs: dict[str, Any]) -> str:
    """Identity of the artifact that `stage` makes from `inputs` under `spec`.

    Args:
        stage: name of the stage.
        format_version: version of the stage's code and file format.
        spec: the semantic keys that the stage reads.
        inputs: content ids by input name.
    """
    return digest({"stage": stage, "format": format_version, "spec": spec, "inputs": inputs})


def table_content_id(table: pa.Table, columns: Sequence[str]) -> str:
    """Hash of the named columns row by row; independent of file layout and compression."""
    return rows_content_id(columns, table.select(list(columns)).to_pylist())


def rows_content_id(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    """As `table_content_id`, for dictionaries."""
    hasher = hashlib.sha256(canonical_json(list(columns)))
    for row in rows:
        hasher.update(canonical_json([row[name] for name in columns]))
        hasher.update(b"\n")
    return hasher.hexdigest()[:32]


def token_lists_id(sequences: Iterable[Sequence[int]]) -> str:
    """Hash of an ordered list of token id lists (int32, little endian, each preceded by its length)."""
    hasher = hashlib.sha256()
    for ids in sequences:
        hasher.update(len(ids).to_bytes(8, "little"))
        hasher.update(np.asarray(ids, dtype="<i4").tobytes())
    return hasher.hexdigest()[:32]


def ids_checksum(ids: Sequence[int] | np.ndarray) -> str:
    """xxh3-64 of token ids (int32, little endian), as hex: tells apart what was asked, where a name does not."""
    return xxhash.xxh3_64_hexdigest(np.asarray(ids, dtype="<i4").tobytes())


def file_checksum(path: Any) -> str:
    """xxh3-128 of a file's bytes, as hex."""
    hasher = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()
