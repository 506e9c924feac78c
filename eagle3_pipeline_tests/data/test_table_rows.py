"""Columns that settings do not name decide nothing; chunks that release 0.1.0 registered stay what they are."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data import registry as registry_module
from eagle3_pipeline.data.conversations import normalise
from eagle3_pipeline.data.registry import ChunkRegistry
from eagle3_pipeline.data.sources import RawRow, read_rows
from eagle3_pipeline.data.table_rows import spell
from eagle3_pipeline.errors import DataError
from eagle3_pipeline_tests.data.conftest import SpecMaker


def _rows(spec: PipelineSpec, path: Path, **how: Any) -> list[RawRow]:
    return list(read_rows(spec.dataset, str(path), **how))


def _digest(value: Any) -> bytes:
    """Of a row of plain values: its JSON with sorted keys and no spaces."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), digest_size=16).digest()


def test_five_megabytes_beside_ten_words_are_a_usable_row(source: Path, make_spec: SpecMaker) -> None:
    image = pa.array([{"bytes": b"\x89" * 5_000_000, "path": None}])
    pq.write_table(pa.table({"prompt": ["ten words"], "image": image}), source / "a.parquet")
    (row,) = _rows(make_spec(max_row_bytes=1000), source / "a.parquet")
    assert (row.value, row.reason, row.raw) == ({"prompt": "ten words"}, "", '{"prompt":"ten words"}')
    assert row.digest == _digest({"prompt": "ten words"})


def test_a_key_of_a_structure_is_read_without_the_others(source: Path, make_spec: SpecMaker) -> None:
    rows = [{"a": {"text": "hi", "image": b"x" * 10_000, "deep": {"er": "s", "no": 1}}, "b.c": "dotted", "z": 1}]
    pq.write_table(pa.Table.from_pylist(rows), source / "a.parquet")
    columns = {"prompt": "a.text", "system": "a.deep.er", "source": "b.c"}
    spec = make_spec(max_row_bytes=200, columns=columns)
    (row,) = _rows(spec, source / "a.parquet")
    assert row.value == {"a": {"text": "hi", "deep": {"er": "s", "no": 1}}, "b.c": "dotted"}
    messages = normalise(row.value, spec.dataset)
    assert messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]


def test_a_row_without_any_named_column_names_what_the_table_has(source: Path, make_spec: SpecMaker) -> None:
    pq.write_table(pa.table({"text": ["x", "y"], "n": [1, 2]}), source / "a.parquet")
    first, _second = _rows(make_spec(), source / "a.parquet")
    assert first.value is not None
    found = normalise(first.value, make_spec().dataset)
    assert "no auto row" in found.detail and "'text', 'n'" in found.detail  # type: ignore[union-attr]


def test_a_value_without_a_spelling_enters_by_its_kind() -> None:
    class Thing:
        pass

    assert spell({"a": Thing(), "b": {1, 2}}) == {"a": {"kind": "Thing"}, "b": {"kind": "set"}}
    assert spell(b"ab") == {"num_bytes": 2, "blake2b": hashlib.blake2b(b"ab", digest_size=16).hexdigest()}
    assert spell(float("nan")) == "nan" and spell((1, None, True)) == [1, None, True]


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    datasets = pytest.importorskip("datasets")
    # No image at all: decoding it would fail.
    image = {"bytes": b"no image" * 1000, "path": None}
    parts = [{"role": "user", "content": f"q{i}", "image": image} for i in range(2)]
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "image": datasets.Image(),
            "messages": [
                {"role": datasets.Value("string"), "content": datasets.Value("string"), "image": datasets.Image()}
            ],
        }
    )
    rows = {"prompt": ["look", "and this"], "image": [image] * 2, "messages": [[part] for part in parts]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    return tmp_path / "set"


def test_images_of_a_hugging_face_data_set_are_not_decoded(images: Path) -> None:
    dataset = {"source": "huggingface", "path": str(images), "max_row_bytes": 2000}
    spec = PipelineSpec.model_validate({"name": "p", "verifier": {"model": "none"}, "dataset": dataset})
    first, second = (_rows(spec, images) for _ in range(2))
    assert [row.digest for row in first] == [row.digest for row in second]
    assert [normalise(row.value or {}, spec.dataset) for row in first] == [
        [{"role": "user", "content": "q0"}],
        [{"role": "user", "content": "q1"}],
    ]
    registry = ChunkRegistry(images.parent / "store", "p")
    registry.sync(spec)
    (chunk,) = registry.chunks()
    chunk.check_content([row.digest for row in first], spec.dataset)


def test_the_digest_of_a_table_of_plain_named_columns_is_that_of_earlier_releases(
    source: Path, make_spec: SpecMaker
) -> None:
    row = {"prompt": "p", "response": "r", "source": "s", "messages": None}
    pq.write_table(pa.Table.from_pylist([row]), source / "a.parquet")
    (now,), (before,) = (_rows(make_spec(), source / "a.parquet", as_0_1_0=old) for old in (False, True))
    assert now.digest == before.digest == _digest(row)


def test_a_chunk_that_an_earlier_release_registered_stays_what_it_is(
    source: Path, make_spec: SpecMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digests are of all columns; those of the named ones are others."""
    rows = [{"prompt": f"p{i}", "id": i, "meta": {"at": [i]}} for i in range(4)]
    file = source / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    registry, spec = ChunkRegistry(tmp_path / "store", "p"), make_spec()
    registry.sync(spec)
    (new,) = registry.chunks()
    old_hash = hashlib.sha256(b"".join(_digest(row) for row in rows)).hexdigest()[:32]
    assert new.content_hash != old_hash
    # As 0.1.0 left it.
    line = json.loads(registry._path.read_text()) | {"content_hash": old_hash}
    registry._path.write_text(json.dumps(line) + "\n")
    (old,) = registry.chunks()
    old.check_content([row.digest for row in _rows(spec, file)], spec.dataset)
    # The file is read anew, with the same rows.
    (registry._folder / "seen_sources.parquet").unlink()
    assert registry.sync(spec).unchanged == ["000000"]
    assert registry.chunks() == [replace(new, content_hash=old_hash)]
    # A row changed in what is read, then in what is not: the first time the chunk is another, by its new hash.
    rows[1]["prompt"] = "other"
    pq.write_table(pa.Table.from_pylist(rows), file)
    with pytest.raises(DataError, match="changed since the chunk was registered"):
        old.check_content([row.digest for row in _rows(spec, file)], spec.dataset)
    assert registry.sync(spec).changed == ["000000"]
    rows[1]["id"] = 99
    pq.write_table(pa.Table.from_pylist(rows), file)
    assert registry.sync(spec).unchanged == ["000000"]
    assert registry_module._content_hash([_digest({"prompt": row["prompt"]}) for row in rows]) == (
        registry.chunks()[0].content_hash
    )
