"""Child processes that fail on purpose."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
KILLED = 99


def run_forked(work: Callable[[], Any]) -> int:
    """Runs `work` in a fork of this process; 0, `KILLED`, or 1 if it raised."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at_call(number: int) -> None:
    """From now on this process ends before its `number`-th (from 0) call that changes or flushes the file system."""
    left = number

    def wrap(function: Callable[..., Any], counts: Callable[..., bool] = lambda *_, **__: True) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if counts(*args, **kwargs):
                if left == 0:
                    os._exit(KILLED)
                left -= 1
            return function(*args, **kwargs)

        return wrapper

    def opens_for_write(_path: Any, mode: str = "r", *_: Any, **__: Any) -> bool:
        return mode[:1] in "wax" or "+" in mode

    for name in ("fsync", "replace", "rename", "open", "unlink", "mkdir"):
        setattr(os, name, wrap(getattr(os, name)))
    io.open = wrap(io.open, opens_for_write)


class Child:
    """A Python process that runs `code` with `arguments` and is waited for line by line."""

    def __init__(self, code: str, *arguments: Any, new_session: bool = False) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            start_new_session=new_session,
        )

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def finish(self) -> int:
        """Closes its standard input and waits for its end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(30)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream and not stream.closed:
                stream.close()


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Polls until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.02)
