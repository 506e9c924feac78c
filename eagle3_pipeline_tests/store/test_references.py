"""Pipelines' pointers to artifacts, and the atomic write below them."""

import json
import os
from pathlib import Path

import pytest

from eagle3_pipeline.errors import DiskSpaceError, StoreError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.references import References
from eagle3_pipeline_tests.store.children import KILLED, die_at_call, run_forked
from eagle3_pipeline_tests.store.conftest import FINGERPRINT, small_manifest


def test_a_reference_is_read_back(tmp_path: Path) -> None:
    references = References(tmp_path, "p")
    assert references.get("dataset", "000001") is None
    references.set("dataset", "000001", small_manifest())
    references.set("vocab_map", None, small_manifest("vocab_map", "f" * 32, "c2"))
    found = references.get("dataset", "000001")
    assert found is not None
    assert (found.stage, found.fingerprint, found.content_id) == ("dataset", FINGERPRINT, "c1")
    assert list(references.places()) == [("dataset", "000001"), ("vocab_map", None)]
    assert References(tmp_path, "q").get("dataset", "000001") is None
    path = tmp_path / "pipelines" / "p" / "dataset" / "000001.json"
    assert json.loads(path.read_text())["fingerprint"] == FINGERPRINT


def test_an_unchanged_reference_is_not_rewritten(tmp_path: Path) -> None:
    references = References(tmp_path, "p")
    references.set("dataset", "0", small_manifest())
    path = tmp_path / "pipelines" / "p" / "dataset" / "0.json"
    before = path.stat()
    references.set("dataset", "0", small_manifest())
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    references.set("dataset", "0", small_manifest(content_id="c2"))
    assert path.stat().st_ino != before.st_ino
    found = references.get("dataset", "0")
    assert found is not None and found.content_id == "c2"


@pytest.mark.parametrize("content", [b"", b"{ torn", b"[]", b'{"stage": "dataset"}'])
def test_an_unreadable_reference_counts_as_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pipelines" / "p" / "dataset" / "0.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert References(tmp_path, "p").get("dataset", "0") is None
    assert list(References(tmp_path, "p").places()) == [("dataset", "0")], "a damaged one is not overlooked"


def test_death_at_any_call_leaves_the_old_or_the_new_reference(tmp_path: Path) -> None:
    seen = []
    for number in range(20):
        references = References(tmp_path / str(number), "p")
        references.set("dataset", "0", small_manifest(content_id="old"))

        def work(references: References = references, number: int = number) -> None:
            die_at_call(number)
            references.set("dataset", "0", small_manifest(content_id="new"))

        code = run_forked(work)
        found = references.get("dataset", "0")
        assert found is not None
        seen.append(found.content_id)
        assert list(references.places()) == [("dataset", "0")]
        if code != KILLED:
            break
    assert seen[0] == "old" and seen[-1] == "new"
    assert seen == sorted(seen, reverse=True), "new once the file is replaced, never before"


def test_two_threads_of_one_process_may_replace_the_same_file(tmp_path: Path) -> None:
    import threading

    path = tmp_path / "file"
    contents = [bytes([65 + i]) * 50_000 for i in range(4)]
    failures: list[BaseException] = []

    def write(data: bytes) -> None:
        try:
            for _ in range(30):
                atomic.write_bytes(path, data)
                assert path.read_bytes() in contents
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(data,)) for data in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert os.listdir(tmp_path) == ["file"]


def test_an_unwritable_place_is_a_store_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot write .*file/below"):
        atomic.write_bytes(tmp_path / "file" / "below", b"x")


def test_too_large_work_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(DiskSpaceError, match=r"states of chunk 7 needs about 1,000,000,000,000,000 bytes .* are free"):
        atomic.require_space(tmp_path / "not" / "there", 10**15, "states of chunk 7")
    atomic.require_space(tmp_path / "not" / "there", 1, "states of chunk 7")


def test_a_link_to_an_artifact_holds_no_references(tmp_path: Path) -> None:
    references = References(tmp_path, "p")
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "config.json").write_text("{}")
    references.folder.mkdir(parents=True)
    (references.folder / "published_draft").symlink_to(tmp_path / "artifact")
    assert list(references.places()) == []
