"""`objects/<stage>/<fingerprint>/`: open, write, publish, verify, quarantine."""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from eagle3_pipeline.errors import CorruptArtifactError, StoreError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.fingerprint import file_checksum
from eagle3_pipeline.store.manifest import MANIFEST_NAME, FileEntry, Manifest, read_manifest, tool_versions, utc_now
from eagle3_pipeline.store.shards import OF_ROWS, read_checksum
from eagle3_pipeline.store.threads import in_threads

_QUARANTINED = "quarantined.json"


@dataclass(frozen=True)
class Artifact:
    """A published artifact: its folder and its manifest."""

    folder: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """Path of one of its files.

        Raises:
            StoreError: the artifact has no such file.
        """
        if name not in self.manifest.files:
            raise StoreError(f"artifact {self.folder} has no file {name}; it has: {', '.join(self.manifest.files)}")
        return self.folder / name


class ArtifactWriter:
    """A `.partial` folder that one process fills and publishes.

    A restarted stage gets the same folder with what its predecessor left, so journals and checkpoints continue.
    """

    def __init__(self, store: "Store", stage: str, fingerprint: str) -> None:
        self._store = store
        self.stage = stage
        self.fingerprint = fingerprint
        self.folder = store.partial_folder(stage, fingerprint)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()

    def publish(self, manifest: Manifest, checksums: Mapping[str, str] | None = None) -> Artifact:
        """Checksums and flushes every file, writes the manifest, renames the folder into place.

        Args:
            manifest: without files, tools, time; they are filled in here.
            checksums: of files that need not be read, by name.

        Raises:
            StoreError: an I/O error; nothing becomes visible.
        """
        final = self._store.object_folder(self.stage, self.fingerprint)
        try:
            (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
            atomic.remove_temporaries(self.folder)
            manifest.files = self._flush_files(checksums or {})
            manifest.tools = tool_versions()
            manifest.created_at = utc_now()
            manifest.wall_s = round(time.monotonic() - self._started, 3)
            atomic.write_bytes(self.folder / MANIFEST_NAME, manifest.model_dump_json(indent=2).encode())
            if final.exists():
                self._store.quarantine(final, "no valid manifest")
            os.rename(self.folder, final)
            atomic.fsync_path(final.parent)
        except OSError as error:
            raise atomic.storage_error(error, self.folder) from error
        return Artifact(final, manifest)

    def _flush_files(self, checksums: Mapping[str, str]) -> dict[str, FileEntry]:
        paths = sorted(p for p in self.folder.rglob("*") if p.is_file())
        names = [path.relative_to(self.folder).as_posix() for path in paths]
        entries = in_threads(lambda name: _flush(self.folder / name, checksums.get(name)), names)
        # The folder itself is flushed once it holds the manifest.
        for folder in {path.parent for path in paths} - {self.folder}:
            atomic.fsync_path(folder)
        return dict(zip(names, entries, strict=True))


def _flush(path: Path, checksum: str | None) -> FileEntry:
    atomic.fsync_path(path)
    return FileEntry(size_bytes=path.stat().st_size, xxh3=checksum or file_checksum(path))


def _checksum(path: Path, expected: str) -> str | Exception:
    """The checksum that a file has now, of the same kind as the expected one."""
    try:
        return read_checksum(path) if expected.startswith(OF_ROWS) else file_checksum(path)
    except Exception as error:  # whatever damage leads to
        return error


class Store:
    """The artifact store under `root`; a POSIX path that every worker sees."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def object_folder(self, stage: str, fingerprint: str) -> Path:
        """Where the artifact lies once published."""
        return self.root / "objects" / stage / fingerprint

    def partial_folder(self, stage: str, fingerprint: str) -> Path:
        """Where the artifact grows."""
        return self.root / "objects" / stage / f"{fingerprint}.partial"

    def get(self, stage: str, fingerprint: str) -> Artifact | None:
        """The published artifact, its file sizes checked; a damaged one is quarantined.

        Raises:
            CorruptArtifactError: a file is missing or has another size than the manifest says.
        """
        folder = self.object_folder(stage, fingerprint)
        manifest = read_manifest(folder)
        if manifest is None or manifest.fingerprint != fingerprint:
            return None
        artifact = Artifact(folder, manifest)
        for name, entry in manifest.files.items():
            path = folder / name
            size = path.stat().st_size if path.exists() else None
            if size != entry.size_bytes:
                found = "is missing" if size is None else f"has {size:,} bytes"
                self.refuse(artifact, f"{name} {found}, the manifest says {entry.size_bytes:,}")
        return artifact

    def require(self, stage: str, fingerprint: str) -> Artifact:
        """As `get`, for an artifact that must be there."""
        artifact = self.get(stage, fingerprint)
        if artifact is None:
            raise StoreError(f"no artifact {stage}/{fingerprint} in {self.root}")
        return artifact

    def verify(self, artifact: Artifact) -> None:
        """Compares every file with its checksum.

        Raises:
            CorruptArtifactError: names the file; the artifact was moved to quarantine.
        """
        files = artifact.manifest.files
        checksums = in_threads(lambda name: _checksum(artifact.folder / name, files[name].xxh3), files)
        for name, found in zip(files, checksums, strict=True):
            if isinstance(found, Exception):
                self.refuse(artifact, f"{name} cannot be read: {found!r}")
            if found != files[name].xxh3:
                self.refuse(artifact, f"{name} has checksum {found}, the manifest says {files[name].xxh3}")

    @contextlib.contextmanager
    def write(
        self, stage: str, fingerprint: str, wait: bool = False, on_wait: Callable[[str], None] | None = None
    ) -> Iterator[ArtifactWriter]:
        """Opens the one writer of this artifact.

        Raises:
            WriterBusyError: another process writes it now and `wait` is false.
        """
        lock = self.root / "objects" / stage / f"{fingerprint}.lock"
        with atomic.exclusive(lock, f"artifact {stage}/{fingerprint}", wait, on_wait):
            yield ArtifactWriter(self, stage, fingerprint)

    def quarantine(self, folder: Path, reason: str) -> Path:
        """Moves a folder aside, with the reason in a file; nothing is deleted."""
        target = self.root / "quarantine" / f"{folder.parent.name}-{folder.name}-{time.time_ns()}"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(folder, target)
        atomic.write_json(target / _QUARANTINED, {"reason": reason, "was": str(folder), "at": utc_now()})
        return target

    def quarantined(self) -> dict[tuple[str, str], str]:
        """Why artifacts were moved to quarantine, by stage and fingerprint; of several reasons the last."""
        found: dict[tuple[str, str], str] = {}
        for path in sorted((self.root / "quarantine").glob(f"*/{_QUARANTINED}")):
            # Garbage collection may remove it meanwhile; what a kill left torn tells nothing.
            with contextlib.suppress(OSError, ValueError, KeyError):
                told = json.loads(path.read_text())
                was = Path(told["was"])
                found[was.parent.name, was.name] = told["reason"]
        return found

    def refuse(self, artifact: Artifact, problem: str) -> NoReturn:
        """Moves a damaged artifact to quarantine and raises `CorruptArtifactError`."""
        target = self.quarantine(artifact.folder, problem)
        manifest = artifact.manifest
        raise CorruptArtifactError(
            f"{manifest.stage}/{manifest.fingerprint}: {problem}. It was moved to {target}; "
            f"materialise {manifest.stage} again"
        )
