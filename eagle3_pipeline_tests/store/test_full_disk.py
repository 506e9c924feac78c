"""A volume that is really full."""

import contextlib
from pathlib import Path

import numpy as np
import pytest

from eagle3_pipeline.errors import DiskSpaceError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.objects import Store
from eagle3_pipeline.store.records import intact_records
from eagle3_pipeline.store.shards import Geometry, map_states, seal_shards, shard_name
from eagle3_pipeline_tests.store.conftest import FILES, FINGERPRINT, STAGE, TMPFS_BYTES, small_manifest, write_artifact


def _fill(path: Path, leave_bytes: int = 0) -> None:
    """Writes until the volume is full, then gives `leave_bytes` back."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass
    with path.open("r+b") as file:
        file.truncate(max(0, path.stat().st_size - leave_bytes))


def test_publishing_on_a_full_disk_fails_with_numbers_and_shows_nothing(small_volume: Path) -> None:
    store = Store(small_volume / "store")
    with store.write(STAGE, FINGERPRINT) as writer:
        for name in ("a.parquet", "b.bin"):
            (writer.folder / name).write_bytes(FILES[name])
        _fill(small_volume / "filler")
        with pytest.raises(DiskSpaceError, match=r"no space left while writing .*: 0 bytes are free"):
            writer.publish(small_manifest())
    assert store.get(STAGE, FINGERPRINT) is None
    assert not store.object_folder(STAGE, FINGERPRINT).exists()
    (small_volume / "filler").unlink()
    artifact = write_artifact(store)
    store.verify(artifact)
    assert set(artifact.manifest.files) == set(FILES)


def test_a_full_disk_keeps_the_old_file(small_volume: Path) -> None:
    path = small_volume / "reference.json"
    atomic.write_json(path, {"old": True})
    _fill(small_volume / "filler")
    with pytest.raises(DiskSpaceError, match="reference.json"):
        atomic.write_bytes(path, b"n" * 5000)
    assert path.read_text() == '{\n  "old": true\n}\n'
    assert sorted(p.name for p in small_volume.iterdir()) == ["filler", "reference.json"]


def test_work_that_does_not_fit_is_refused_before_it_starts(small_volume: Path) -> None:
    atomic.require_space(small_volume / "x", TMPFS_BYTES // 2, "half")
    with pytest.raises(DiskSpaceError, match=r"twice needs about 1,048,576 bytes"):
        atomic.require_space(small_volume / "x", 2 * TMPFS_BYTES, "twice")


def test_an_appender_on_a_full_disk_records_the_loss_and_goes_on_when_there_is_space(small_volume: Path) -> None:
    geometry = Geometry((1, 2), 256)  # 1,024 bytes a row
    rows = {f"s{i}": np.full((64, 2, 256), i + 1, dtype=np.uint16) for i in range(12)}
    folder = small_volume / "states"
    appender = ShardAppender(folder, geometry, 1 << 30)
    outcomes = {name: appender.append(name, data.data) for name, data in list(rows.items())[:10]}
    # 64 KiB each on 512 KiB: about seven fit.
    lost = [name for name, record in outcomes.items() if record.error]
    assert 0 < len(outcomes) - len(lost) < 8
    assert all("No space left" in outcomes[name].error and outcomes[name].shard == -1 for name in lost)
    assert set(intact_records(folder, geometry)) <= set(outcomes) - set(lost)

    # The operator frees space: the tail that was lost is cut off by the seal, here a larger part is.
    with (folder / shard_name(0)).open("r+b") as file:
        file.truncate(4096 + 3 * 64 * 1024)
    later = appender.append("s11", rows["s11"].data)
    assert later.error == ""
    intact = intact_records(folder, geometry)
    assert set(intact) == {"s0", "s1", "s2", "s11"}
    tokens = {name: np.arange(64, dtype=np.int32) for name in intact}
    seal_shards(folder, intact.values(), tokens, geometry, {})
    states, ids = map_states(folder / shard_name(0))
    start = intact["s11"].row_start
    assert np.array_equal(states[start : start + 64], rows["s11"])
    assert ids[start - 1] == -1, "rows of lost sequences belong to nobody"


def test_records_that_did_not_fit_are_written_with_the_next_one(small_volume: Path) -> None:
    geometry = Geometry((1,), 8)
    folder = small_volume / "states"
    appender = ShardAppender(folder, geometry, 1 << 30)
    data = np.ones((2, 1, 8), dtype=np.uint16).data
    appender.append("first", data)
    _fill(small_volume / "filler")
    # A record is about 130 bytes, so these exceed what is left of the records' last page.
    names = [f"while_full_{i}" for i in range(60)]
    for name in names:
        appender.append(name, data)
    (small_volume / "filler").unlink()
    appender.append("last", data)
    assert set(intact_records(folder, geometry)) == {"first", *names, "last"}
