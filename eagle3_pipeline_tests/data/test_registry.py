"""The chunk registry: append-only, a change stays where it happened, the first occurrence of a conversation wins."""

import threading
from pathlib import Path

import pytest

from eagle3_pipeline.data.registry import REGISTRY_NAME, Chunk, ChunkRegistry
from eagle3_pipeline.data.sources import read_rows
from eagle3_pipeline.errors import DataError, StoreError
from eagle3_pipeline_tests.data.conftest import SpecMaker, row, write_jsonl
from eagle3_pipeline_tests.store.children import Child


@pytest.fixture
def registry(tmp_path: Path) -> ChunkRegistry:
    return ChunkRegistry(tmp_path / "store", "p")


def _rows(name: str, count: int) -> list[dict]:
    return [row(f"{name} {i}") for i in range(count)]


def _places(registry: ChunkRegistry) -> list[tuple[str, str, int, int]]:
    return [(c.key, Path(c.file).name, c.row_start, c.num_rows) for c in registry.chunks()]


def test_files_are_cut_into_chunks_in_order_of_names(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "b.jsonl", _rows("b", 4))
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    result = registry.sync(make_spec())
    assert result.added == ["000000", "000001", "000002"] and not result.changed and not result.unchanged
    assert _places(registry) == [
        ("000000", "a.jsonl", 0, 4),
        ("000001", "a.jsonl", 4, 2),
        ("000002", "b.jsonl", 0, 4),
    ]
    # Four rows of 17 bytes: {"prompt": "a 0"} and a line break.
    assert [c.byte_start for c in registry.chunks()] == [0, 4 * 18, 0]
    assert registry.sync(make_spec()).unchanged == ["000000", "000001", "000002"]


def test_a_sync_without_news_does_not_rewrite_the_registry(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    registry.sync(make_spec())
    path = tmp_path / "store" / "pipelines" / "p" / REGISTRY_NAME
    before = path.stat()
    registry.sync(make_spec())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_new_files_get_new_keys_whatever_their_names(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "m.jsonl", _rows("m", 5))
    registry.sync(make_spec())
    before = registry.chunks()
    write_jsonl(source / "a.jsonl", _rows("a", 1))
    result = registry.sync(make_spec())
    assert (result.added, result.unchanged) == (["000002"], ["000000", "000001"])
    assert registry.chunks()[:2] == before


def test_a_changed_row_changes_its_chunk_only(source: Path, registry: ChunkRegistry, make_spec: SpecMaker) -> None:
    rows = _rows("a", 10)
    write_jsonl(source / "a.jsonl", rows)
    registry.sync(make_spec())
    before = {c.key: c.content_id for c in registry.chunks()}
    rows[5] = row("a much longer text, so that what follows lies elsewhere in the file")
    write_jsonl(source / "a.jsonl", rows)
    result = registry.sync(make_spec())
    assert (result.added, result.changed, result.unchanged) == ([], ["000001"], ["000000", "000002"])
    after = {c.key: c.content_id for c in registry.chunks()}
    assert {key for key in before if before[key] != after[key]} == {"000001"}
    last = registry.chunk("000002")
    found = list(read_rows(make_spec().dataset, last.file, last.row_start, last.byte_start, last.num_rows))
    assert [r.value for r in found] == rows[8:], "the offset of the chunk behind it moved along"


def test_a_growing_file_fills_its_last_chunk_and_adds_others(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    write_jsonl(source / "b.jsonl", _rows("b", 1))
    registry.sync(make_spec())
    write_jsonl(source / "a.jsonl", _rows("a", 11))
    result = registry.sync(make_spec())
    assert (result.added, result.changed, result.unchanged) == (["000003"], ["000001"], ["000000", "000002"])
    assert _places(registry) == [
        ("000000", "a.jsonl", 0, 4),
        ("000001", "a.jsonl", 4, 4),
        ("000002", "b.jsonl", 0, 1),
        ("000003", "a.jsonl", 8, 3),
    ]


def test_known_chunks_keep_their_cuts_when_the_chunk_size_changes(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 8))
    registry.sync(make_spec())
    write_jsonl(source / "a.jsonl", _rows("a", 11))
    result = registry.sync(make_spec(samples_per_chunk=2))
    assert (result.added, result.changed) == (["000002", "000003"], [])
    assert [(c.row_start, c.num_rows) for c in registry.chunks()] == [(0, 4), (4, 4), (8, 2), (10, 1)]


def test_a_removed_file_keeps_its_keys_and_comes_back_to_them(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    write_jsonl(source / "b.jsonl", _rows("b", 2))
    registry.sync(make_spec())
    before = registry.chunks()
    (source / "a.jsonl").unlink()
    assert registry.sync(make_spec()).changed == ["000000", "000001"]
    assert [(c.key, c.num_rows) for c in registry.chunks()] == [("000000", 0), ("000001", 0), ("000002", 2)]
    write_jsonl(source / "c.jsonl", _rows("c", 1))
    assert registry.sync(make_spec()).added == ["000003"], "a key is never used again"
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    registry.sync(make_spec())
    assert registry.chunks()[:3] == before


def test_a_shorter_file_loses_its_last_chunks(source: Path, registry: ChunkRegistry, make_spec: SpecMaker) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 10))
    registry.sync(make_spec())
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    assert registry.sync(make_spec()).changed == ["000001", "000002"]
    assert [c.num_rows for c in registry.chunks()] == [4, 2, 0]


def test_the_first_occurrence_of_a_conversation_wins(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    same = row("same")
    write_jsonl(source / "a.jsonl", [row("x"), same, row("y"), same, same])
    write_jsonl(source / "b.jsonl", [same, row("z")])
    registry.sync(make_spec())
    assert [c.duplicate_rows for c in registry.chunks()] == [(3,), (4,), (0,)]


def test_other_columns_do_not_make_another_conversation(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    messages = {"messages": [{"role": "user", "content": "one"}]}
    rows = [row("one", id=1), row("one", id=2), row("one ", id=3), messages, row("one", system="s")]
    write_jsonl(source / "a.jsonl", rows)
    registry.sync(make_spec(samples_per_chunk=9))
    assert registry.chunks()[0].duplicate_rows == (1, 3)


def test_unusable_rows_are_no_duplicates_of_each_other(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    (source / "a.jsonl").write_text('\n\n{"prompt": ""}\n{"prompt": ""}\nbroken\nbroken\n{"prompt": "p"}\n')
    registry.sync(make_spec(samples_per_chunk=9))
    assert (registry.chunks()[0].num_rows, registry.chunks()[0].duplicate_rows) == (7, ())


def test_new_files_take_no_rows_from_old_chunks(source: Path, registry: ChunkRegistry, make_spec: SpecMaker) -> None:
    write_jsonl(source / "m.jsonl", _rows("m", 3))
    registry.sync(make_spec())
    write_jsonl(source / "a.jsonl", [*_rows("m", 3), row("new")])
    result = registry.sync(make_spec())
    assert (result.added, result.changed) == (["000001"], [])
    assert registry.chunk("000000").duplicate_rows == ()
    assert registry.chunk("000001").duplicate_rows == (0, 1, 2)


def test_new_chunks_of_an_old_file_take_no_rows_from_another_files_old_chunks(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 4))
    write_jsonl(source / "b.jsonl", _rows("b", 4))
    registry.sync(make_spec())
    write_jsonl(source / "a.jsonl", [*_rows("a", 4), *_rows("b", 4)])
    result = registry.sync(make_spec())
    assert (result.added, result.changed) == (["000002"], [])
    assert registry.chunk("000002").duplicate_rows == (4, 5, 6, 7)
    assert registry.sync(make_spec()).unchanged == ["000000", "000001", "000002"]


@pytest.mark.parametrize(("limit", "expected"), [(1, [1]), (4, [4]), (5, [4, 1]), (7, [4, 2, 1]), (99, [4, 2, 3])])
def test_max_samples_takes_the_first_rows(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, limit: int, expected: list[int]
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 6))
    write_jsonl(source / "b.jsonl", _rows("b", 3))
    registry.sync(make_spec(max_samples=limit))
    assert [c.num_rows for c in registry.chunks()] == expected


def test_max_samples_prefers_registered_rows_to_new_ones(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 4))
    write_jsonl(source / "b.jsonl", _rows("b", 2))
    registry.sync(make_spec(max_samples=7))
    write_jsonl(source / "a.jsonl", _rows("a", 8))
    result = registry.sync(make_spec(max_samples=7))
    assert (result.added, result.changed) == (["000002"], [])
    assert [c.num_rows for c in registry.chunks()] == [4, 2, 1], "7 - 4 - 2 = 1 new row"


def test_a_lower_max_samples_keeps_the_first_rows(source: Path, registry: ChunkRegistry, make_spec: SpecMaker) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 4))
    write_jsonl(source / "b.jsonl", _rows("b", 4))
    registry.sync(make_spec())
    registry.sync(make_spec(max_samples=5))
    assert [c.num_rows for c in registry.chunks()] == [4, 1]


def test_the_content_id_of_a_chunk_does_not_depend_on_where_it_lies(
    source: Path, tmp_path: Path, make_spec: SpecMaker
) -> None:
    same = [row("x"), row("y"), row("x")]
    write_jsonl(source / "a.jsonl", [*_rows("a", 4), *same])
    write_jsonl(tmp_path / "moved" / "other.jsonl", same)
    first, second = ChunkRegistry(tmp_path / "1", "p"), ChunkRegistry(tmp_path / "2", "p")
    first.sync(make_spec())
    second.sync(make_spec(path=str(tmp_path / "moved" / "*.jsonl")))
    assert first.chunk("000001").content_id == second.chunk("000000").content_id
    assert first.chunk("000001").duplicate_rows == (6,)
    assert first.chunk("000000").content_id != first.chunk("000001").content_id


def test_line_ends_are_no_content(source: Path, tmp_path: Path, make_spec: SpecMaker) -> None:
    ids = []
    for name, end in (("unix", b"\n"), ("dos", b"\r\n")):
        (source / "a.jsonl").write_bytes(b'{"prompt": "x"}' + end + b'{"prompt": "y"}' + end)
        registry = ChunkRegistry(tmp_path / name, "p")
        registry.sync(make_spec())
        ids.append(registry.chunk("000000").content_id)
    assert ids[0] == ids[1]


def test_content_that_changed_since_the_sync_is_refused(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 3))
    registry.sync(make_spec())
    chunk = registry.chunk("000000")
    digests = [r.digest for r in read_rows(make_spec().dataset, chunk.file)]
    chunk.check_content(digests)
    with pytest.raises(DataError, match=r"chunk 000000: .*a\.jsonl changed .* \(3 rows found, 3 registered\)"):
        chunk.check_content(digests[::-1])
    with pytest.raises(DataError, match=r"\(2 rows found, 3 registered\); run eagle3 sync-chunks"):
        chunk.check_content(digests[:2])


def test_an_unknown_chunk_is_an_error_that_names_it(registry: ChunkRegistry) -> None:
    assert registry.chunks() == []
    with pytest.raises(StoreError, match="chunk 000007 is not in"):
        registry.chunk("000007")


@pytest.mark.parametrize("content", ["{ torn", "[]\n", '{"key": "000000"}\n', '{"duplicate_rows": []}\n', "7\n"])
def test_a_damaged_registry_is_an_error_and_is_not_overwritten(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "store" / "pipelines" / "p" / REGISTRY_NAME
    path.parent.mkdir(parents=True)
    path.write_text(content)
    write_jsonl(source / "a.jsonl", _rows("a", 3))
    for use in (registry.chunks, lambda: registry.sync(make_spec())):
        with pytest.raises(StoreError, match=r"chunk registry .*chunks\.jsonl is damaged"):
            use()
    assert path.read_text() == content


def test_two_processes_that_sync_at_once_register_every_row_once(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path
) -> None:
    for number in range(5):
        write_jsonl(source / f"{number}.jsonl", _rows(str(number), 9))
    code = """
        import sys
        from pathlib import Path
        from eagle3_pipeline.config import PipelineSpec
        from eagle3_pipeline.data.registry import ChunkRegistry
        spec = PipelineSpec.model_validate_json(sys.argv[2])
        print("ready", flush=True)
        sys.stdin.readline()
        for _ in range(20):
            ChunkRegistry(Path(sys.argv[1]), "p").sync(spec)
    """
    spec = make_spec().model_dump_json()
    with Child(code, tmp_path / "store", spec) as one, Child(code, tmp_path / "store", spec) as two:
        assert (one.line(), two.line()) == ("ready", "ready")
        threads = [threading.Thread(target=child.finish) for child in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (one.process.returncode, two.process.returncode) == (0, 0)
    found = registry.chunks()
    assert [c.key for c in found] == [f"{i:06d}" for i in range(15)]
    assert sorted((c.file, c.row_start) for c in found) == [
        (str(source / f"{number}.jsonl"), start) for number in range(5) for start in (0, 4, 8)
    ]


def test_a_sync_waits_for_another_one(
    source: Path, registry: ChunkRegistry, make_spec: SpecMaker, tmp_path: Path
) -> None:
    write_jsonl(source / "a.jsonl", _rows("a", 3))
    code = """
        import sys
        from pathlib import Path
        from eagle3_pipeline.store.atomic import exclusive
        with exclusive(Path(sys.argv[1]), "registry"):
            print("syncing", flush=True)
            sys.stdin.read()
    """
    with Child(code, tmp_path / "store" / "pipelines" / "p" / "chunks.lock") as other:
        assert other.line() == "syncing"
        thread = threading.Thread(target=registry.sync, args=(make_spec(),))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive() and registry.chunks() == []
        other.finish()
        thread.join(20)
    assert [c.key for c in registry.chunks()] == ["000000"]


def test_a_chunk_without_duplicates_differs_from_one_with() -> None:
    one = Chunk("000000", "f", 10, 3, 0, "hash", ())
    two = Chunk("000000", "f", 10, 3, 0, "hash", (11,))
    moved = Chunk("000009", "g", 20, 3, 7, "hash", (21,))
    assert one.content_id != two.content_id == moved.content_id
