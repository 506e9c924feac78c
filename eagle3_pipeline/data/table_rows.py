"""Rows of tables (Parquet, Hugging Face): which columns are read of them, and how their values are spelled."""

import datetime
import decimal
import hashlib
import math
import uuid
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from eagle3_pipeline.config import ColumnsSpec

# Their text is always the same.
_SPELLED = (float, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


class TableRow(dict[str, Any]):
    """The columns of a row that settings name.

    In a table every key of a structure is there, null where the row did not have it.

    Attributes:
        unread: names of the table's other columns.
    """

    unread: tuple[str, ...] = ()


def named_columns(columns: ColumnsSpec, present: Iterable[str]) -> dict[str, list[str]]:
    """Which of a table's columns are read, each with the keys of it that are (none: all of it).

    Args:
        columns: names by settings; `a.b` is the column of that name, else key b of column a.
        present: the table's columns.
    """
    known, found = set(present), dict[str, list[str]]()
    whole: set[str] = set()
    for name in columns.model_dump().values():
        outer, dot, inner = name.partition(".")
        if name in known:
            whole.add(name)
            found.setdefault(name, [])
        elif dot and outer in known:
            found.setdefault(outer, []).append(inner)
    return {name: [] if name in whole else sorted(set(keys)) for name, keys in found.items()}


def parquet_paths(schema: pa.Schema, named: dict[str, list[str]]) -> list[str]:
    """What to read of a Parquet file: columns, or single keys of structures."""
    paths = []
    for name, keys in named.items():
        kind = schema.field(name).type if schema.names.count(name) == 1 else None
        if keys and kind is not None and pa.types.is_struct(kind) and "." not in name:
            known = [kind.field(i).name for i in range(kind.num_fields)]
            inner = [key if key in known else key.partition(".")[0] for key in keys]
            if all(key in known for key in inner):
                paths += [f"{name}.{key}" for key in dict.fromkeys(inner)]
                continue
        paths.append(name)
    return paths


def restrict(value: dict[str, Any], named: dict[str, list[str]], present: Iterable[str]) -> TableRow:
    """The named columns of a row, and of structures the named keys."""
    row = TableRow()
    for name, keys in named.items():
        found = value.get(name)
        if keys and isinstance(found, dict):
            outer = {key if key in found else key.partition(".")[0] for key in keys}
            found = {key: item for key, item in found.items() if key in outer}
        if name in value:
            row[name] = found
    row.unread = tuple(name for name in present if name not in named)
    return row


def spell(value: Any) -> Any:
    """What JSON can spell: numbers that are not finite, dates and the like become text, bytes a hash.

    Of anything else only the kind is spelled: its text may name an address, which is another one each time.
    """
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(spell(key)): spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell(item) for item in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, _SPELLED):
        return str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return {"num_bytes": len(value), "blake2b": hashlib.blake2b(value, digest_size=16).hexdigest()}
    if hasattr(value, "tolist"):  # arrays and scalars of NumPy and torch
        return spell(value.tolist())
    return {"kind": type(value).__name__}


def spell_as_0_1_0(value: Any) -> Any:
    """As release 0.1.0 spelled whole rows, for chunks that it registered."""
    if isinstance(value, dict):
        return {str(key): spell_as_0_1_0(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [spell_as_0_1_0(item) for item in value]
    if value is None or isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
