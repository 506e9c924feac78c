"""Which files of a folder are opened, by whatever code: the kernel tells."""

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_OPEN, _IN_ISDIR, _IN_Q_OVERFLOW = 0x20, 0x40000000, 0x4000
_HEADER = struct.Struct("iIII")


@contextmanager
def opened_files(folder: Path) -> Iterator[set[str]]:
    """The set is filled with the names of opened files when the context ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0 or libc.inotify_add_watch(fd, os.fsencode(folder), _IN_OPEN) < 0:
        raise OSError(ctypes.get_errno(), f"inotify cannot watch {folder}")
    opened: set[str] = set()
    try:
        yield opened
        while events := _read(fd):
            while events:
                _, mask, _, length = _HEADER.unpack_from(events)
                assert not mask & _IN_Q_OVERFLOW, "more opens than the kernel keeps"
                if not mask & _IN_ISDIR:
                    opened.add(os.fsdecode(events[_HEADER.size : _HEADER.size + length].rstrip(b"\0")))
                events = events[_HEADER.size + length :]
    finally:
        os.close(fd)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""
