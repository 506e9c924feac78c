"""Canonical JSON, fingerprints, content ids."""

import hashlib
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from eagle3_pipeline.store.fingerprint import (
    canonical_json,
    digest,
    file_checksum,
    fingerprint,
    rows_content_id,
    table_content_id,
    token_lists_id,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def test_canonical_json_is_spelled_one_way() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "ä"}) == '{"a":"ä","b":[1,2.5,null]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [float("-inf")]}])
def test_canonical_json_refuses_what_is_not_json(value: object) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical_json(value)


def test_lone_surrogates_have_a_digest() -> None:
    assert digest("\ud800") == _sha(b'"\xed\xa0\x80"')


@given(st.dictionaries(st.text(), JSON, min_size=2))
def test_key_order_does_not_matter(value: dict) -> None:
    assert digest(value) == digest(dict(reversed(list(value.items()))))


def test_the_fingerprint_is_the_digest_of_its_four_parts() -> None:
    literal = b'{"format":3,"inputs":{"rows":"r1"},"spec":{"lr":0.5},"stage":"dataset"}'
    assert fingerprint("dataset", 3, {"lr": 0.5}, {"rows": "r1"}) == _sha(literal)


def test_every_part_of_a_fingerprint_matters() -> None:
    variants = [
        fingerprint("dataset", 1, {"k": 1}, {"rows": "r"}),
        fingerprint("vocab_map", 1, {"k": 1}, {"rows": "r"}),
        fingerprint("dataset", 2, {"k": 1}, {"rows": "r"}),
        fingerprint("dataset", 1, {"k": 2}, {"rows": "r"}),
        fingerprint("dataset", 1, {"k": True}, {"rows": "r"}),
        fingerprint("dataset", 1, {"k": "1"}, {"rows": "r"}),
        fingerprint("dataset", 1, {"K": 1}, {"rows": "r"}),
        fingerprint("dataset", 1, {"k": 1}, {"rows": "s"}),
        fingerprint("dataset", 1, {"k": 1}, {"columns": "r"}),
        fingerprint("dataset", 1, {"k": 1, "rows": "r"}, {}),
    ]
    assert len(set(variants)) == len(variants)


ROWS = [{"id": f"row {i}", "n": i, "tags": ["x"] * (i % 3), "note": None if i % 2 else "é"} for i in range(50)]
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int64()), ("tags", pa.list_(pa.string())), ("note", pa.string())])


def test_rows_content_id_is_a_hash_of_lines() -> None:
    lines = b'["n","id"][0,"row 0"]\n[1,"row 1"]\n'
    assert rows_content_id(("n", "id"), ROWS[:2]) == _sha(lines)


def test_the_content_id_of_a_table_does_not_depend_on_its_file(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS, SCHEMA)
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7, compression="none")
    pq.write_table(table, tmp_path / "b.parquet", compression="zstd", use_dictionary=False)
    pq.write_table(table.select(["note", "tags", "n", "id"]), tmp_path / "c.parquet", row_group_size=1)
    paths = sorted(tmp_path.glob("*.parquet"))
    assert len({path.read_bytes() for path in paths}) == 3
    columns = ("id", "n", "tags", "note")
    ids = {table_content_id(pq.read_table(path), columns) for path in paths}
    assert ids == {rows_content_id(columns, ROWS)}


def test_the_content_id_of_a_table_depends_on_rows_order_and_columns() -> None:
    columns = ("id", "n")
    ids = {
        rows_content_id(columns, ROWS),
        rows_content_id(columns, ROWS[::-1]),
        rows_content_id(columns, ROWS[:-1]),
        rows_content_id(columns, [*ROWS[:-1], {**ROWS[-1], "n": -1}]),
        rows_content_id(("n", "id"), ROWS),
        rows_content_id(("id",), ROWS),
    }
    assert len(ids) == 6
    other_note = [{**row, "note": "not a semantic column"} for row in ROWS]
    assert rows_content_id(columns, other_note) == rows_content_id(columns, ROWS)


def test_token_lists_are_hashed_with_their_lengths() -> None:
    data = struct.pack("<Q2i", 2, 5, -1) + struct.pack("<Q", 0) + struct.pack("<Qi", 1, 70000)
    assert token_lists_id([[5, -1], [], [70000]]) == _sha(data)
    assert token_lists_id([[1, 2], [3]]) != token_lists_id([[1], [2, 3]])


def test_a_file_checksum_covers_every_block(tmp_path: Path) -> None:
    data = bytes(9 * 2**20) + b"end"
    (tmp_path / "f").write_bytes(data)
    assert file_checksum(tmp_path / "f") == xxhash.xxh3_128_hexdigest(data)
