"""Rows of JSONL files, Parquet files and Hugging Face folders."""

import json
import os
import random
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.registry import ChunkRegistry
from eagle3_pipeline.data.sources import read_rows, source_files
from eagle3_pipeline.errors import DataError
from eagle3_pipeline_tests.data.conftest import SpecMaker, write_jsonl


def test_every_line_is_a_row_and_bad_ones_have_a_reason(source: Path, make_spec: SpecMaker) -> None:
    lines = [
        b'{"prompt": "good"}',
        b"",
        b"   ",
        b'{"prompt": "cut off',
        b"[1, 2]",
        b'"text"',
        b"\x00\xff\xfe\x80binary",
        b"[" * 100_000,
        '{"prompt": "ünï"}'.encode(),
        b'{"prompt": "last"}',
    ]
    path = source / "a.jsonl"
    path.write_bytes(b"\n".join(lines))  # no line break at the end
    rows = list(read_rows(make_spec().dataset, str(path)))
    reasons = ["", "empty", "empty", "bad_json", "not_an_object", "not_an_object", "bad_json", "bad_json", "", ""]
    assert [r.reason for r in rows] == reasons
    assert [r.number for r in rows] == list(range(10))
    assert [r.byte_start for r in rows] == [sum(len(line) + 1 for line in lines[:i]) for i in range(10)]
    assert [r.value for r in rows if r.value] == [{"prompt": "good"}, {"prompt": "ünï"}, {"prompt": "last"}]
    assert rows[3].raw == '{"prompt": "cut off\n'
    assert len(rows[7].raw) == 4096


def test_dos_line_ends_and_a_byte_order_mark_do_no_harm(source: Path, make_spec: SpecMaker) -> None:
    path = source / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two"}\r\n')
    rows = list(read_rows(make_spec().dataset, str(path)))
    assert [(r.value, r.reason) for r in rows] == [({"prompt": "one"}, ""), (None, "empty"), ({"prompt": "two"}, "")]


def test_an_empty_file_has_no_rows(source: Path, make_spec: SpecMaker) -> None:
    (source / "a.jsonl").touch()
    assert list(read_rows(make_spec().dataset, str(source / "a.jsonl"))) == []


def test_a_line_over_the_limit_is_rejected_and_not_kept_in_memory(source: Path, make_spec: SpecMaker) -> None:
    path = source / "a.jsonl"
    path.write_bytes(b'{"prompt": "' + b"x" * 10_000_000 + b'"}\n{"prompt": "next"}\n')
    tracemalloc.start()
    rows = list(read_rows(make_spec(max_row_bytes=100_000).dataset, str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(r.value, r.reason, r.byte_start) for r in rows] == [
        (None, "row_too_long", 0),
        ({"prompt": "next"}, "", 10_000_015),
    ]
    assert peak < 5_000_000
    within = list(read_rows(make_spec(max_row_bytes=10_000_015).dataset, str(path)))
    assert within[0].value is not None and len(within[0].value["prompt"]) == 10_000_000


def test_long_lines_that_differ_at_their_ends_have_different_digests(source: Path, make_spec: SpecMaker) -> None:
    path = source / "a.jsonl"
    path.write_bytes(b"x" * 3_000_000 + b"1\n" + b"x" * 3_000_000 + b"2\n" + b"x" * 3_000_000 + b"1\n")
    one, two, three = (r.digest for r in read_rows(make_spec(max_row_bytes=10).dataset, str(path)))
    assert one == three != two


def test_a_range_of_a_jsonl_file_is_read_from_its_offset(source: Path, make_spec: SpecMaker) -> None:
    path = write_jsonl(source / "a.jsonl", [{"n": i} for i in range(10)])
    rows = list(read_rows(make_spec().dataset, str(path), start=4, byte_start=4 * len('{"n": 0}\n'), count=3))
    assert [(r.number, r.value) for r in rows] == [(4, {"n": 4}), (5, {"n": 5}), (6, {"n": 6})]


@pytest.mark.parametrize(("start", "count"), [(0, None), (0, 3), (5, 4), (9, 1), (8, 99), (3, 0), (10, 5)])
def test_a_range_of_a_parquet_file_crosses_row_groups(
    source: Path, make_spec: SpecMaker, start: int, count: int | None
) -> None:
    path = source / "a.parquet"
    values = [{"n": i, "prompt": f"p{i}"} for i in range(10)]
    pq.write_table(pa.Table.from_pylist(values), path, row_group_size=3)
    rows = list(read_rows(make_spec(columns={"source": "n"}).dataset, str(path), start=start, count=count))
    end = 10 if count is None else min(10, start + count)
    assert [(r.number, r.value) for r in rows] == [(i, values[i]) for i in range(start, end)]


def test_the_digest_of_a_parquet_row_does_not_depend_on_the_file(source: Path, make_spec: SpecMaker) -> None:
    values = [{"prompt": f"p{i}", "score": float(i)} for i in range(5)]
    pq.write_table(pa.Table.from_pylist(values), source / "a.parquet", row_group_size=2)
    pq.write_table(pa.Table.from_pylist(values), source / "b.parquet", compression="zstd")
    digests = [[r.digest for r in read_rows(make_spec().dataset, str(source / n))] for n in ("a.parquet", "b.parquet")]
    assert digests[0] == digests[1] and len(set(digests[0])) == 5


def test_parquet_values_that_json_lacks_do_no_harm(source: Path, make_spec: SpecMaker) -> None:
    numbers = [float("nan"), float("inf"), float("-inf"), 1.0]
    texts = ["NaN", "null", "x", "y"]
    table = pa.table({"prompt": texts, "score": numbers, "data": [b"\xff", b"", None, b"a"]})
    pq.write_table(table, source / "a.parquet")
    rows = list(read_rows(make_spec().dataset, str(source / "a.parquet")))
    assert [r.value["prompt"] for r in rows if r.value] == texts
    assert len({r.digest for r in rows}) == 4


def test_texts_that_look_like_json_numbers_stay_apart(source: Path, make_spec: SpecMaker) -> None:
    pq.write_table(pa.table({"prompt": ["NaN", "null"]}), source / "a.parquet")
    one, two = read_rows(make_spec().dataset, str(source / "a.parquet"))
    assert one.digest != two.digest


@pytest.mark.parametrize("damage", ["cut", "junk", "empty"])
def test_a_file_that_is_no_parquet_is_one_rejected_row(source: Path, make_spec: SpecMaker, damage: str) -> None:
    path = source / "a.parquet"
    pq.write_table(pa.table({"prompt": ["x"] * 1000}), path)
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-20], "junk": b"PAR1" + os.urandom(100), "empty": b""}[damage])
    (row,) = read_rows(make_spec().dataset, str(path))
    assert (row.number, row.value, row.reason) == (0, None, "unreadable_file")
    assert list(read_rows(make_spec().dataset, str(path), start=1)) == []


def test_rows_of_a_damaged_row_group_are_rejected_and_the_others_are_read(source: Path, make_spec: SpecMaker) -> None:
    path = source / "a.parquet"
    texts = [f"{i:040d}" for i in range(30)]
    pq.write_table(
        pa.table({"prompt": texts}), path, row_group_size=10, compression="none", use_dictionary=False,
        write_page_checksum=False,
    )  # fmt: skip
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset : column.data_page_offset + column.total_compressed_size] = bytes(
        column.total_compressed_size
    )
    path.write_bytes(data)
    rows = list(read_rows(make_spec().dataset, str(path)))
    assert [row.number for row in rows] == list(range(30))
    assert [row.value["prompt"] if row.value else row.reason for row in rows] == (
        texts[:10] + ["unreadable_row"] * 10 + texts[20:]
    )
    assert [row.number for row in read_rows(make_spec().dataset, str(path), start=15, count=10)] == list(range(15, 25))


def test_any_damage_of_a_parquet_file_gives_rows_or_rejections(source: Path, make_spec: SpecMaker) -> None:
    path, rng = source / "a.parquet", random.Random(0)
    pq.write_table(pa.table({"prompt": [f"p{i}" for i in range(200)]}), path, row_group_size=50)
    good = path.read_bytes()
    reasons = set()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(rng.choice([1, 4, 40])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        reasons |= {row.reason for row in read_rows(make_spec().dataset, str(path))}
    assert {"", "unreadable_file"} <= reasons <= {"", "unreadable_file", "unreadable_row", "invalid_text"}


@pytest.mark.parametrize(
    "odd",
    [
        pa.array([1, 2**62, 3], pa.timestamp("us")),
        pa.array([1, 2**31 - 1, 3], pa.date32()),
        pa.array([1, 2**62, 3], pa.timestamp("us", tz="Nowhere/Else")),
    ],
    ids=["timestamp", "date", "time zone"],
)
def test_rows_with_values_that_python_does_not_know_are_rejected_alone(
    source: Path, make_spec: SpecMaker, odd: pa.Array
) -> None:
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "at": odd}), source / "a.parquet")
    rows = list(read_rows(make_spec(columns={"source": "at"}).dataset, str(source / "a.parquet")))
    assert [row.number for row in rows] == [0, 1, 2]
    # Of a column that nobody names they are not even read.
    assert {row.reason for row in read_rows(make_spec().dataset, str(source / "a.parquet"))} == {""}
    assert rows[1].reason == "unreadable_row" and rows[1].raw
    assert {row.reason for row in rows} <= {"", "unreadable_row"}


def test_the_longest_row_is_a_setting_for_tables_too(source: Path, make_spec: SpecMaker) -> None:
    pq.write_table(pa.table({"prompt": ["short", "x" * 200]}), source / "a.parquet")
    first, second = read_rows(make_spec(max_row_bytes=100).dataset, str(source / "a.parquet"))
    assert first.value == {"prompt": "short"}
    assert (second.value, second.reason, second.raw[:13]) == (None, "row_too_long", '{"prompt":"xx')


def test_of_a_line_that_is_too_long_the_beginning_is_kept(source: Path, make_spec: SpecMaker) -> None:
    (source / "a.jsonl").write_text('{"prompt": "' + "x" * 200 + '"}\n{"prompt": "y"}\n')
    first, second = read_rows(make_spec(max_row_bytes=100).dataset, str(source / "a.jsonl"))
    assert first.reason == "row_too_long" and first.raw.startswith('{"prompt": "xxx')
    assert second.value == {"prompt": "y"}


def test_a_parquet_row_of_invalid_text_is_rejected_alone(source: Path, make_spec: SpecMaker) -> None:
    table = pa.table({"prompt": pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())})
    pq.write_table(table, source / "a.parquet")
    rows = list(read_rows(make_spec().dataset, str(source / "a.parquet")))
    assert [row.value["prompt"] if row.value else row.reason for row in rows] == ["good", "invalid_text", "fine"]


def test_a_missing_file_is_a_data_error_that_names_it(source: Path, make_spec: SpecMaker) -> None:
    with pytest.raises(
        DataError, match=r"cannot read .*gone\.jsonl.*; if it was moved or removed, run eagle3 sync-chunks"
    ):
        list(read_rows(make_spec().dataset, str(source / "gone.jsonl")))


def test_files_are_found_by_a_glob(source: Path, make_spec: SpecMaker) -> None:
    for name in ("b.jsonl", "a.parquet", "sub/c.jsonl"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).touch()
    flat, deep = make_spec().dataset, make_spec(path=str(source / "**" / "*.jsonl")).dataset
    assert [p.name for p in source_files(flat)] == ["a.parquet", "b.jsonl"]
    assert [p.name for p in source_files(deep)] == ["b.jsonl", "c.jsonl"]


def test_a_glob_that_matches_nothing_or_other_files_is_refused(source: Path, make_spec: SpecMaker) -> None:
    with pytest.raises(DataError, match=r"dataset\.path .*\*\.\* matches no file"):
        source_files(make_spec().dataset)
    (source / "notes.csv").touch()
    with pytest.raises(DataError, match=r"notes\.csv; only \.jsonl and \.parquet"):
        source_files(make_spec().dataset)


@pytest.fixture
def huggingface_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets")
    conversations = [[{"from": "human", "value": f"q{i}"}, {"from": "gpt", "value": f"a{i}"}] for i in range(7)]
    train = datasets.Dataset.from_dict({"conversations": conversations, "id": list(range(7))})
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(folder)
    return folder


def _huggingface(folder: Path, **more: object) -> PipelineSpec:
    dataset = {"source": "huggingface", "path": str(folder), "samples_per_chunk": 3, **more}
    return PipelineSpec.model_validate({"name": "p", "verifier": {"model": "none"}, "dataset": dataset})


def test_a_saved_hugging_face_folder_is_read_by_range(huggingface_folder: Path) -> None:
    spec = _huggingface(huggingface_folder, columns={"source": "id"})
    rows = list(read_rows(spec.dataset, spec.dataset.path, start=2, count=2))
    assert [(r.number, r.value["id"], r.value["conversations"][0]["value"]) for r in rows if r.value] == [
        (2, 2, "q2"),
        (3, 3, "q3"),
    ]
    assert json.loads(rows[0].raw)["conversations"][1] == {"from": "gpt", "value": "a2"}
    assert len(list(read_rows(_huggingface(huggingface_folder, split="test").dataset, "any"))) == 1


def test_a_hugging_face_folder_is_cut_into_chunks(huggingface_folder: Path, tmp_path: Path) -> None:
    registry = ChunkRegistry(tmp_path / "store", "p")
    registry.sync(_huggingface(huggingface_folder))
    assert [(c.row_start, c.num_rows) for c in registry.chunks()] == [(0, 3), (3, 3), (6, 1)]
    assert {c.file for c in registry.chunks()} == {str(huggingface_folder)}


def test_a_split_that_does_not_exist_is_a_data_error(huggingface_folder: Path) -> None:
    with pytest.raises(DataError, match=r"cannot load the Hugging Face data set .*\(split 'validation'\)"):
        list(read_rows(_huggingface(huggingface_folder, split="validation").dataset, "any"))
