"""Finds and removes what nothing refers to: objects, left-over partial folders, scratch, quarantine."""

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.errors import WriterBusyError
from eagle3_pipeline.store import atomic

# What names an artifact: stage and fingerprint.
Key = tuple[str, str]
_PARTIAL = ".partial"
_DOOMED = ".doomed"


@dataclass(frozen=True)
class Garbage:
    """A folder that nothing refers to.

    Attributes:
        kind: object, partial, scratch or quarantine.
        path: the folder.
        num_bytes: bytes of its files.
        age_s: seconds since something in it was last written.
        lock: the lock file of the artifact's writer.
    """

    kind: str
    path: Path
    num_bytes: int
    age_s: float
    lock: Path

    def remove(self) -> bool:
        """Deletes it, unless somebody writes it just now; it disappears at once, then its files."""
        with contextlib.suppress(WriterBusyError), atomic.exclusive(self.lock, f"{self.kind} {self.path.name}"):
            doomed = self.path.with_name(f".{self.path.name}.{os.getpid()}{_DOOMED}")
            self.path.rename(doomed)
            shutil.rmtree(doomed)
            if self.kind != "partial":
                self.lock.unlink(missing_ok=True)
            return True
        return False


def find_garbage(root: Path, scratch: Path, used: Collection[Key]) -> Iterator[Garbage]:
    """What nothing refers to.

    Args:
        root: the store.
        scratch: folder of logs and journals of unfinished stages, by stage and fingerprint.
        used: artifacts that are referred to or asked for; what was begun of the latter continues.
    """
    for folder in _folders(root / "objects"):
        partial = folder.suffix == _PARTIAL
        key = (folder.parent.name, folder.stem if partial else folder.name)
        if key not in used:
            yield _garbage("partial" if partial else "object", folder, folder.with_name(f"{key[1]}.lock"))
    for folder in _folders(scratch):
        key = (folder.parent.name, folder.name)
        if key not in used:
            yield _garbage("scratch", folder, root / "objects" / key[0] / f"{key[1]}.lock")
    for folder in sorted(p for pattern in ("*/", f".*{_DOOMED}/") for p in (root / "quarantine").glob(pattern)):
        yield _garbage("quarantine", folder, folder.with_suffix(".lock"))


def _folders(parent: Path) -> Iterator[Path]:
    for folder in sorted(parent.glob("*/*/")):
        # What a killed `gc` had begun to delete is garbage still.
        if not folder.name.startswith(".") or folder.name.endswith(_DOOMED):
            yield folder


def _garbage(kind: str, folder: Path, lock: Path) -> Garbage:
    found = [path.lstat() for path in (folder, *folder.rglob("*"))]
    num_bytes = sum(entry.st_size for entry in found if stat.S_ISREG(entry.st_mode))
    return Garbage(kind, folder, num_bytes, time.time() - max(entry.st_mtime for entry in found), lock)
