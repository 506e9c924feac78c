"""A store with one small artifact, and a volume that is easily filled."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline.store.objects import Artifact, Store

STAGE, FINGERPRINT = "dataset", "0123456789abcdef0123456789abcdef"
FILES = {"a.parquet": b"first" * 100, "b.bin": bytes(range(256)) * 40, "sub/c.txt": b"in a folder"}
TMPFS_BYTES = 512 * 1024


def small_manifest(stage: str = STAGE, fingerprint: str = FINGERPRINT, content_id: str = "c1") -> Manifest:
    return Manifest(stage=stage, fingerprint=fingerprint, content_id=content_id, spec={"k": 1}, inputs={"rows": "r"})


def write_artifact(store: Store) -> Artifact:
    with store.write(STAGE, FINGERPRINT) as writer:
        (writer.folder / "sub").mkdir(exist_ok=True)
        for name, data in FILES.items():
            with (writer.folder / name).open("wb") as file:
                file.write(data)
        return writer.publish(small_manifest())


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def small_volume(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 512 KiB."""
    if os.getuid() != 0:
        pytest.skip("NOT TESTED: a full disk (mounting a small tmpfs needs root)")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: a full disk (cannot mount a tmpfs: {mounted.stderr.strip()})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
