"""Checksums of shards come from those of their sequences, and any damage to what a sequence owns changes them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash

from eagle3_pipeline.errors import CorruptArtifactError
from eagle3_pipeline.store import objects
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.fingerprint import file_checksum
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline.store.objects import Artifact, Store
from eagle3_pipeline.store.shards import (
    HEADER_BYTES,
    INDEX_NAME,
    Geometry,
    read_checksum,
    recorded_checksums,
    seal_shards,
    shard_name,
)

GEOMETRY = Geometry((1, 3), 8)  # 32 bytes a row
LENGTHS = {"a": 3, "lost": 2, "b": 4, "c": 5}


def _capture(folder: Path) -> None:
    """Two shards; the first holds rows of `lost`, which no sequence owns, between those of `a` and `b`."""
    appender = ShardAppender(folder, GEOMETRY, HEADER_BYTES + 9 * GEOMETRY.row_bytes)
    draw = np.random.default_rng(0)
    states = {name: draw.integers(1, 0x7F80, (n, 2, 8), dtype=np.uint16) for name, n in LENGTHS.items()}
    records = [appender.append(name, rows.data) for name, rows in states.items()]
    appender.close()
    kept = [record for record in records if record.sequence_id != "lost"]
    tokens = {name: np.arange(n, dtype=np.int32) for name, n in LENGTHS.items()}
    seal_shards(folder, kept, tokens, GEOMETRY, {"layer_ids": [1, 3]})


def _publish(store: Store) -> Artifact:
    with store.write("hidden_states", "f") as writer:
        _capture(writer.folder)
        return writer.publish(_manifest(), recorded_checksums(writer.folder))


def _manifest() -> Manifest:
    return Manifest(stage="hidden_states", fingerprint="f", content_id="c", spec={}, inputs={})


def test_a_shards_checksum_is_of_its_header_its_ids_and_its_sequences_in_order(tmp_path: Path) -> None:
    _capture(tmp_path)
    data = (tmp_path / shard_name(0)).read_bytes()
    rows = data[HEADER_BYTES : HEADER_BYTES + 9 * 32]
    sequences = [xxhash.xxh3_64_hexdigest(part) for part in (rows[: 3 * 32], rows[5 * 32 :])]
    ids = np.asarray([0, 1, 2, -1, -1, 0, 1, 2, 3], dtype="<i4").tobytes()
    expected = "rows:" + xxhash.xxh3_128_hexdigest(data[:HEADER_BYTES] + ids + ",".join(sequences).encode())
    assert recorded_checksums(tmp_path)[shard_name(0)] == read_checksum(tmp_path / shard_name(0)) == expected
    assert read_checksum(tmp_path / shard_name(1)) == recorded_checksums(tmp_path)[shard_name(1)] != expected


def test_publishing_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a row that the disk lost before is not taken for what was captured."""
    read: list[str] = []

    def noted(path: Path) -> str:
        read.append(path.name)
        return file_checksum(path)

    monkeypatch.setattr(objects, "file_checksum", noted)
    store = Store(tmp_path)
    with store.write("hidden_states", "f") as writer:
        _capture(writer.folder)
        expected = recorded_checksums(writer.folder)
        path = writer.folder / shard_name(0)
        path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bytes(32) + path.read_bytes()[HEADER_BYTES + 32 :])
        assert recorded_checksums(writer.folder) == expected
        artifact = writer.publish(_manifest(), expected)
    assert read == [INDEX_NAME]
    with pytest.raises(CorruptArtifactError, match="shard-00000.safetensors has checksum"):
        store.verify(artifact)


def test_every_byte_that_a_reader_could_see_is_covered(tmp_path: Path) -> None:
    _capture(tmp_path)
    path = tmp_path / shard_name(0)
    data, expected = path.read_bytes(), read_checksum(path)
    unowned = range(HEADER_BYTES + 3 * 32, HEADER_BYTES + 5 * 32)
    for position in [*range(0, 300), *range(HEADER_BYTES - 20, len(data))]:
        damaged = bytearray(data)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            same = read_checksum(path) == expected
        except Exception:  # of a damaged header any
            same = False
        assert same == (position in unowned), position


def test_an_index_with_any_flipped_byte_is_refused(tmp_path: Path) -> None:
    artifact = _publish(Store(tmp_path / "good"))
    data = artifact.path(INDEX_NAME).read_bytes()
    for position in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        root = tmp_path / str(position)
        shutil.copytree(tmp_path / "good", root)
        store = Store(root)
        copy = store.require("hidden_states", "f")
        copy.path(INDEX_NAME).write_bytes(damaged)
        with pytest.raises(CorruptArtifactError, match=rf"{INDEX_NAME} has checksum"):
            store.verify(copy)
        shutil.rmtree(root)


@pytest.mark.parametrize("name", [shard_name(1), INDEX_NAME])
@pytest.mark.parametrize("kind", ["header", "end", "cleared"])
def test_a_damaged_artifact_is_refused_by_name_and_quarantined(tmp_path: Path, name: str, kind: str) -> None:
    store = Store(tmp_path)
    artifact = _publish(store)
    data = bytearray(artifact.path(name).read_bytes())
    if kind == "cleared":
        data[:] = bytes(len(data))
    else:
        data[0 if kind == "header" else -1] ^= 1
    artifact.path(name).write_bytes(data)
    with pytest.raises(CorruptArtifactError, match=rf"hidden_states/f: {name} (has checksum|cannot be read)"):
        store.verify(artifact)
    assert store.get("hidden_states", "f") is None


def test_an_artifact_of_an_earlier_version_is_verified_by_its_files_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.write("hidden_states", "f") as writer:
        _capture(writer.folder)
        artifact = writer.publish(_manifest())
    assert not artifact.manifest.files[shard_name(0)].xxh3.startswith("rows:")
    store.verify(artifact)
    path = artifact.path(shard_name(0))
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(CorruptArtifactError, match="has checksum"):
        store.verify(artifact)
