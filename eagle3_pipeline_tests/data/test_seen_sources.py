"""A sync reads only files that changed, and comes to the same registry as one that reads everything."""

import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.data import registry as registry_module
from eagle3_pipeline.data.registry import SEEN_NAME, ChunkRegistry
from eagle3_pipeline.data.sources import read_rows
from eagle3_pipeline_tests.data.conftest import SpecMaker, row, write_jsonl


class Reads:
    """Names of the files that were read since the last look."""

    def __init__(self) -> None:
        self.files: list[str] = []

    def take(self) -> list[str]:
        found, self.files = [Path(file).name for file in self.files], []
        return found


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()

    def reading(spec: Any, file: str, *arguments: Any) -> Iterator[Any]:
        found.files.append(file)
        return read_rows(spec, file, *arguments)

    monkeypatch.setattr(registry_module, "read_rows", reading)
    return found


@pytest.fixture
def registry(tmp_path: Path) -> ChunkRegistry:
    return ChunkRegistry(tmp_path / "store", "p")


def settle(folder: Path) -> None:
    """Dates all files back: one that was written just now may be written again without a sign of it."""
    for number, path in enumerate(sorted(folder.iterdir())):
        if path.stat().st_mtime > time.time() - 100:
            os.utime(path, (time.time() - 3600 - number, time.time() - 3600 - number))


def test_files_that_did_not_change_are_not_read_again(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, reads: Reads
) -> None:
    for name in ("a", "b", "c"):
        write_jsonl(source / f"{name}.jsonl", [row(f"{name} {i}") for i in range(6)])
    settle(source)
    registry.sync(make_spec())
    assert reads.take() == ["a.jsonl", "b.jsonl", "c.jsonl"]
    before = registry.chunks()
    assert len(registry.sync(make_spec()).unchanged) == 6 and reads.take() == []
    write_jsonl(source / "b.jsonl", [row(f"b {i}") for i in range(5)] + [row("another")])
    write_jsonl(source / "d.jsonl", [row("d")])
    settle(source)
    result = registry.sync(make_spec())
    assert sorted(reads.take()) == ["b.jsonl", "d.jsonl"]
    assert (result.changed, result.added) == (["000003"], ["000006"])
    assert registry.chunks()[:3] == before[:3] and registry.chunks()[4:6] == before[4:6]


def test_a_file_that_was_written_just_now_is_read_again(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, reads: Reads
) -> None:
    path = write_jsonl(source / "a.jsonl", [row("one")])
    registry.sync(make_spec())
    before = path.stat()
    # As many bytes, and no later time of change than before.
    write_jsonl(path, [row("two")])
    os.utime(path, ns=(before.st_mtime_ns, before.st_mtime_ns))
    assert registry.sync(make_spec()).changed == ["000000"]
    assert reads.take() == ["a.jsonl", "a.jsonl"]


def test_what_an_unread_file_holds_still_makes_later_rows_duplicates(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, reads: Reads
) -> None:
    write_jsonl(source / "a.jsonl", [row("same"), "no row", row("other")])
    settle(source)
    registry.sync(make_spec())
    reads.take()
    write_jsonl(source / "b.jsonl", [row("new"), row("same", id=7), "no row"])
    settle(source)
    registry.sync(make_spec())
    assert reads.take() == ["b.jsonl"]
    assert registry.chunk("000001").duplicate_rows == (1,)


@pytest.mark.parametrize("setting", [{"samples_per_chunk": 3}, {"max_row_bytes": 20}, {"format": "prompt"}])
def test_other_settings_of_reading_read_everything(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, reads: Reads, setting: dict[str, Any]
) -> None:
    write_jsonl(source / "a.jsonl", [row("one")])
    settle(source)
    registry.sync(make_spec())
    reads.take()
    registry.sync(make_spec(**setting))
    assert reads.take() == ["a.jsonl"]
    registry.sync(make_spec(**setting, min_yield=0.1))
    assert reads.take() == []


@pytest.mark.parametrize("damage", ["cut", "junk", "gone"])
def test_without_what_was_seen_everything_is_read(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, reads: Reads, tmp_path: Path, damage: str
) -> None:
    write_jsonl(source / "a.jsonl", [row("one")])
    settle(source)
    registry.sync(make_spec())
    seen = tmp_path / "store" / "pipelines" / "p" / SEEN_NAME
    content = seen.read_bytes()
    if damage == "gone":
        seen.unlink()
    else:
        seen.write_bytes(content[: len(content) // 2] if damage == "cut" else b"junk")
    reads.take()
    assert registry.sync(make_spec()).unchanged == ["000000"]
    assert reads.take() == ["a.jsonl"]
    registry.sync(make_spec())
    assert reads.take() == []


def test_a_registry_that_was_removed_is_made_again(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path
) -> None:
    write_jsonl(source / "a.jsonl", [row("one")])
    settle(source)
    registry.sync(make_spec())
    before = registry.chunks()
    (tmp_path / "store" / "pipelines" / "p" / "chunks.jsonl").unlink()
    assert registry.sync(make_spec()).added == ["000000"]
    assert registry.chunks() == before


def test_a_sync_that_runs_out_of_time_goes_on_with_the_next(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, reads: Reads
) -> None:
    for name in ("a", "b", "c"):
        write_jsonl(source / f"{name}.jsonl", [row(f"{name} {i}") for i in range(4)])
    settle(source)
    left = []
    for _ in range(4):
        left.append(registry.sync(make_spec(), read_for_s=0.0).num_unread)
    assert left == [2, 1, 0, 0]
    assert reads.take() == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert [Path(chunk.file).name for chunk in registry.chunks()] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    # A changed file keeps its old chunk until it is read.
    before = registry.chunk("000000")
    for name in ("a", "b"):
        write_jsonl(source / f"{name}.jsonl", [row(f"{name} changed {i}") for i in range(4)])
    settle(source)
    result = registry.sync(make_spec(), read_for_s=0.0)
    assert (result.changed, result.num_unread) == (["000000"], 1)
    assert registry.chunk("000000") != before
    assert registry.sync(make_spec(), read_for_s=0.0).changed == ["000001"]


def test_many_changes_give_the_registry_of_a_full_reading(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path
) -> None:
    """Random edits, some with rows that other files have; a second registry forgets what it saw before every sync."""
    randomness = random.Random(3)
    forgetful = ChunkRegistry(tmp_path / "other", "p")
    for step in range(25):
        name = randomness.choice("abcdef")
        path = source / f"{name}.jsonl"
        if randomness.random() < 0.15 and path.exists() and len(list(source.iterdir())) > 1:
            path.unlink()
        else:
            write_jsonl(path, [row(f"text {randomness.randrange(30)}") for _ in range(randomness.randrange(1, 12))])
            os.utime(path, (time.time() - 9000 + step, time.time() - 9000 + step))
        registry.sync(make_spec())
        (tmp_path / "other" / "pipelines" / "p" / SEEN_NAME).unlink(missing_ok=True)
        forgetful.sync(make_spec())
        assert registry.chunks() == forgetful.chunks(), f"after step {step}"


def test_rows_added_to_a_huggingface_data_set_are_new_chunks(
    registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path, reads: Reads
) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    spec = make_spec(source="huggingface", path=str(folder))
    datasets.Dataset.from_list([row(f"r {i}") for i in range(6)]).save_to_disk(folder)
    assert registry.sync(spec).added == ["000000", "000001"]
    assert registry.sync(spec).unchanged == ["000000", "000001"]
    assert len(reads.take()) == 1
    shutil.rmtree(folder)
    datasets.Dataset.from_list([row(f"r {i}") for i in range(13)]).save_to_disk(folder)
    result = registry.sync(spec)
    assert (result.changed, result.added) == (["000001"], ["000002", "000003"])
    assert [chunk.num_rows for chunk in registry.chunks()] == [4, 4, 4, 1]
