"""Durable writes: a reader sees the old file or the new one, never a part of either."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from eagle3_pipeline.errors import DiskSpaceError, StoreError, WriterBusyError

TEMPORARY_SUFFIX = ".tmp"
_POLL_S = 0.02
_REPORT_EVERY_S = 10.0


def fsync_path(path: Path) -> None:
    """Flushes a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes) -> None:
    """Replaces `path` atomically and durably.

    Raises:
        DiskSpaceError: the volume is full.
        StoreError: any other I/O error.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}{TEMPORARY_SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise storage_error(error, path) from error


def remove_temporaries(folder: Path) -> None:
    """Removes what a process that died within `write_bytes` left in a folder that nobody else writes to."""
    for path in folder.rglob(f".*{TEMPORARY_SUFFIX}"):
        path.unlink()


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` with pretty JSON, atomically and durably."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def storage_error(error: OSError, path: Path) -> StoreError:
    """The error of ours for an `OSError` met while writing `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(existing_parent(path)).free
        return DiskSpaceError(f"no space left while writing {path}: {free:,} bytes are free; free some and run again")
    return StoreError(f"cannot write {path}: {error}")


def existing_parent(path: Path) -> Path:
    """The nearest folder above `path` (or itself) that exists."""
    while not path.is_dir():
        path = path.parent
    return path


def require_space(path: Path, num_bytes: int, what: str) -> None:
    """Refuses work whose output does not fit the volume of `path`.

    Raises:
        DiskSpaceError: with both numbers.
    """
    free = shutil.disk_usage(existing_parent(path)).free
    if num_bytes > free:
        raise DiskSpaceError(f"{what} needs about {num_bytes:,} bytes on the volume of {path}, {free:,} are free")


@contextlib.contextmanager
def exclusive(
    path: Path, what: str, wait: bool = False, on_wait: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Holds an advisory lock on `path`; the kernel drops it when the process ends.

    Args:
        path: the lock file.
        what: what the lock guards, for messages.
        wait: wait for another holder instead of raising.
        on_wait: told at once, and about every 10 s, that this call waits.

    Raises:
        WriterBusyError: another process holds it and `wait` is false.
        StoreError: the lock file cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+")
    except OSError as error:
        raise storage_error(error, path) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            busy = f"another process works on the {what} (lock {path})"
            if not wait:
                raise WriterBusyError(busy) from error
            _wait_for_lock(file, lambda: on_wait(f"{busy}; waiting for it") if on_wait else None)
        yield


def _wait_for_lock(file: IO[str], report: Callable[[], None]) -> None:
    next_report = time.monotonic()
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if time.monotonic() >= next_report:
            report()
            next_report = time.monotonic() + _REPORT_EVERY_S
        time.sleep(_POLL_S)
