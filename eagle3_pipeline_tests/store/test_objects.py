"""One writer, corruption, quarantine, manifests."""

import json
from pathlib import Path

import pytest
import xxhash

from eagle3_pipeline.errors import CorruptArtifactError, StoreError, WriterBusyError
from eagle3_pipeline.store.manifest import MANIFEST_NAME, read_manifest
from eagle3_pipeline.store.objects import Store
from eagle3_pipeline_tests.store.children import Child
from eagle3_pipeline_tests.store.conftest import (
    FILES,
    FINGERPRINT,
    STAGE,
    files_of,
    small_manifest,
    write_artifact,
)

HOLD_WRITER = """
    import sys
    from pathlib import Path
    from eagle3_pipeline.store.objects import Store
    with Store(Path(sys.argv[1])).write(sys.argv[2], sys.argv[3]):
        print("holding", flush=True)
        sys.stdin.read()
"""


def _quarantined(store: Store) -> list[Path]:
    return sorted((store.root / "quarantine").glob("*"))


def test_the_manifest_lists_sizes_and_checksums_of_all_files(store: Store) -> None:
    write_artifact(store)
    artifact = store.get(STAGE, FINGERPRINT)
    assert artifact is not None
    for name, data in FILES.items():
        entry = artifact.manifest.files[name]
        assert (entry.size_bytes, entry.xxh3) == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert artifact.manifest.size_bytes == 500 + 10240 + 11
    assert artifact.manifest.spec == {"k": 1}
    assert artifact.path("sub/c.txt").read_bytes() == b"in a folder"


def test_an_unknown_file_is_refused_with_the_names_there_are(store: Store) -> None:
    with pytest.raises(StoreError, match=r"has no file d\.txt; it has: a\.parquet, b\.bin, sub/c\.txt"):
        write_artifact(store).path("d.txt")


def test_require_names_what_is_missing(store: Store) -> None:
    assert store.get(STAGE, FINGERPRINT) is None
    with pytest.raises(StoreError, match=f"no artifact {STAGE}/{FINGERPRINT}"):
        store.require(STAGE, FINGERPRINT)


def test_a_second_process_is_refused_while_one_writes(store: Store) -> None:
    with Child(HOLD_WRITER, store.root, STAGE, FINGERPRINT) as child:
        assert child.line() == "holding"
        with pytest.raises(WriterBusyError, match=f"{STAGE}/{FINGERPRINT}"), store.write(STAGE, FINGERPRINT):
            pass
        # Another fingerprint has a lock of its own.
        with store.write(STAGE, "f" * 32):
            pass
        assert child.finish() == 0
    assert files_of(write_artifact(store).folder).keys() == {*FILES, MANIFEST_NAME}


def test_the_lock_of_a_killed_writer_is_free_at_once(store: Store) -> None:
    with Child(HOLD_WRITER, store.root, STAGE, FINGERPRINT) as child:
        assert child.line() == "holding"
        child.kill()
        write_artifact(store)


def test_a_waiting_writer_gets_its_turn(store: Store) -> None:
    with Child(HOLD_WRITER, store.root, STAGE, FINGERPRINT) as first:
        assert first.line() == "holding"
        with Child(
            HOLD_WRITER.replace("sys.argv[3])", "sys.argv[3], wait=True)"), store.root, STAGE, FINGERPRINT
        ) as second:
            assert first.finish() == 0
            assert second.line() == "holding"


def test_a_new_writer_continues_in_the_partial_folder(store: Store) -> None:
    with store.write(STAGE, FINGERPRINT) as writer:
        (writer.folder / "journal.jsonl").write_text("row\n")
    with store.write(STAGE, FINGERPRINT) as writer:
        assert (writer.folder / "journal.jsonl").read_text() == "row\n"
    assert store.get(STAGE, FINGERPRINT) is None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"short"), r"b\.bin has 5 bytes, the manifest says 10,240"),
        (lambda path: path.unlink(), r"b\.bin is missing, the manifest says 10,240"),
    ],
    ids=["truncated", "missing"],
)
def test_a_wrong_size_is_found_at_open_and_quarantined(store: Store, damage, message: str) -> None:
    damage(write_artifact(store).path("b.bin"))
    with pytest.raises(CorruptArtifactError, match=message) as caught:
        store.get(STAGE, FINGERPRINT)
    (moved,) = _quarantined(store)
    assert str(moved) in str(caught.value) and f"materialise {STAGE} again" in str(caught.value)
    note = json.loads((moved / "quarantined.json").read_text())
    assert "b.bin" in note["reason"]
    assert note["was"] == str(store.object_folder(STAGE, FINGERPRINT))
    assert (moved / "a.parquet").read_bytes() == FILES["a.parquet"], "nothing is deleted"
    assert store.get(STAGE, FINGERPRINT) is None
    write_artifact(store)
    assert store.get(STAGE, FINGERPRINT) is not None


def test_a_flipped_bit_is_found_by_verify_and_quarantined(store: Store) -> None:
    path = write_artifact(store).path("b.bin")
    data = bytearray(FILES["b.bin"])
    data[5000] ^= 1
    path.write_bytes(data)
    artifact = store.get(STAGE, FINGERPRINT)
    assert artifact is not None, "sizes are right, so opening does not notice"
    found, expected = (xxhash.xxh3_128_hexdigest(bytes(d)) for d in (data, FILES["b.bin"]))
    with pytest.raises(CorruptArtifactError, match=rf"b\.bin has checksum {found}, the manifest says {expected}"):
        store.verify(artifact)
    (moved,) = _quarantined(store)
    assert f"checksum {found}" in json.loads((moved / "quarantined.json").read_text())["reason"]
    assert store.get(STAGE, FINGERPRINT) is None


@pytest.mark.parametrize("manifest", [None, b"{ torn", b"[]", b'{"format": 1, "stage": "dataset"}', b'{"format": "x"}'])
def test_a_folder_without_a_valid_manifest_is_quarantined_and_never_merged(
    store: Store, manifest: bytes | None
) -> None:
    folder = store.object_folder(STAGE, FINGERPRINT)
    folder.mkdir(parents=True)
    (folder / "stranger.bin").write_bytes(b"?")
    if manifest is not None:
        (folder / MANIFEST_NAME).write_bytes(manifest)
    assert store.get(STAGE, FINGERPRINT) is None
    artifact = write_artifact(store)
    assert set(files_of(artifact.folder)) == {*FILES, MANIFEST_NAME}
    (moved,) = _quarantined(store)
    assert (moved / "stranger.bin").exists()
    assert "manifest" in json.loads((moved / "quarantined.json").read_text())["reason"]


def test_a_manifest_of_another_fingerprint_does_not_count(store: Store) -> None:
    artifact = write_artifact(store)
    other = "e" * 32
    artifact.folder.rename(store.object_folder(STAGE, other))
    assert store.get(STAGE, other) is None


def test_a_newer_manifest_format_is_refused_with_what_to_do(store: Store) -> None:
    path = write_artifact(store).folder / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 7, "new_key": 1}))
    with pytest.raises(StoreError, match="format 7, this version reads 2: upgrade eagle3_pipeline"):
        store.get(STAGE, FINGERPRINT)
    assert path.exists(), "what a newer version wrote is left alone"


def test_a_manifest_survives_the_round_trip(tmp_path: Path) -> None:
    manifest = small_manifest()
    manifest.metrics = {"num_samples": 3.0}
    manifest.rejected = {"empty": 2}
    (tmp_path / MANIFEST_NAME).write_text(manifest.model_dump_json())
    assert read_manifest(tmp_path) == manifest
