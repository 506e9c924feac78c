"""Records of captured sequences that are not what a writer left."""

import json
from pathlib import Path

import pytest

from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.records import intact_records, read_records
from eagle3_pipeline.store.shards import RECORDS_NAME, Geometry

GEOMETRY = Geometry((1, 2), 8)
CHANGES = [
    {"row_start": -5},
    {"row_start": 10**9},
    {"row_start": 10**30},
    {"num_tokens": -5},
    {"num_tokens": "3"},
    {"num_tokens": 10**9},
    {"num_tokens": True},
    {"shard": "x"},
    {"shard": None},
    {"shard": 7},
    {"sequence_id": ["a"]},
    {"checksum": 5},
    {"error": None},
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_damaged_record_is_not_intact(tmp_path: Path, change: dict) -> None:
    appender = ShardAppender(tmp_path, GEOMETRY, 2**20)
    for name in ("a", "b"):
        appender.append(name, memoryview(bytes(range(3 * GEOMETRY.row_bytes))))
    path = tmp_path / RECORDS_NAME
    first, second = path.read_text().splitlines()
    path.write_text(json.dumps({**json.loads(first), **change}) + f"\n{second}\n")
    assert set(intact_records(tmp_path, GEOMETRY)) == {"b"}


def test_a_line_nested_too_deep_is_no_record(tmp_path: Path) -> None:
    (tmp_path / RECORDS_NAME).write_text("[" * 100_000 + "\n")
    assert read_records(tmp_path) == []
