"""A writer that dies before any of its file-system calls leaves the store as it was or complete."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.store.manifest import MANIFEST_NAME
from eagle3_pipeline.store.objects import Store
from eagle3_pipeline_tests.store.children import KILLED, die_at_call, run_forked
from eagle3_pipeline_tests.store.conftest import FILES, FINGERPRINT, STAGE, files_of, write_artifact

MOST_CALLS = 200


def _write_and_die(root: Path, number: int) -> int:
    def work() -> None:
        die_at_call(number)
        write_artifact(Store(root))

    return run_forked(work)


def _check_complete(store: Store) -> bool:
    """Whether the artifact is there; if it is, it must be whole."""
    artifact = store.get(STAGE, FINGERPRINT)
    if artifact is None:
        assert not store.object_folder(STAGE, FINGERPRINT).exists()
        return False
    store.verify(artifact)
    found = files_of(artifact.folder)
    del found[MANIFEST_NAME]
    assert found == FILES
    assert set(artifact.manifest.files) == set(FILES)
    return True


def test_death_at_every_call_leaves_nothing_or_all_and_a_rerun_completes(tmp_path: Path) -> None:
    outcomes = []
    for number in range(MOST_CALLS):
        root = tmp_path / f"{number:03d}"
        code = _write_and_die(root, number)
        assert code in (0, KILLED), f"call {number}"
        store = Store(root)
        outcomes.append(_check_complete(store))
        if not outcomes[-1]:
            write_artifact(store)
        assert _check_complete(store), f"rerun after death at call {number}"
        assert not store.partial_folder(STAGE, FINGERPRINT).exists()
        assert not (root / "quarantine").exists()
        if code == 0:
            break
    else:
        raise AssertionError(f"the writer makes more than {MOST_CALLS} calls")
    # Visible only from the rename on: after it, one flush of the folder (an open and an fsync) and the end are left.
    assert outcomes == [False] * (len(outcomes) - 3) + [True] * 3
    # Lock, folders, three files written and flushed, manifest written, flushed, replaced, published.
    assert len(outcomes) > 20


def test_two_deaths_in_a_row_are_survived(tmp_path: Path) -> None:
    # The second writer meets what the first one left, the manifest of an unpublished folder included.
    total = next(n for n in range(MOST_CALLS) if _write_and_die(tmp_path / f"count-{n}", n) == 0)
    for first in range(total - 6, total):
        for second in range(0, total, 5):
            root = tmp_path / f"{first}-{second}"
            _write_and_die(root, first)
            store = Store(root)
            if not _check_complete(store):
                _write_and_die(root, second)
            if not _check_complete(store):
                write_artifact(store)
            assert _check_complete(store)


def test_an_overwritten_file_of_a_dead_writer_is_checksummed_anew(store: Store) -> None:
    with store.write(STAGE, FINGERPRINT) as writer:
        (writer.folder / "a.parquet").write_bytes(b"left by a writer that died, longer than the final content" * 20)
    artifact = write_artifact(store)
    assert hashlib.sha256(artifact.path("a.parquet").read_bytes()).digest() == hashlib.sha256(b"first" * 100).digest()
    store.verify(artifact)


def test_everything_is_on_the_disk_before_it_becomes_visible(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    at_rename: list[set[str]] = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        flushed.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def recording_rename(*paths: Any) -> None:
        at_rename.append(set(flushed))
        rename(*paths)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "rename", recording_rename)
    artifact = write_artifact(store)
    partial = store.partial_folder(STAGE, FINGERPRINT)
    (before,) = at_rename
    assert {str(partial / name) for name in FILES} | {str(partial), str(partial / "sub")} <= before
    assert any(MANIFEST_NAME in Path(path).name for path in before)
    assert flushed[-1] == str(artifact.folder.parent), "the rename itself"
