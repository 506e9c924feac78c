"""Subprocess workers: heavy libraries live there, JSON events come back on their standard output."""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from eagle3_pipeline.errors import Eagle3Error

EventHandler = Callable[[dict[str, Any]], None]
_TERMINATION_GRACE_S = 20.0
LEASE_RECORDS = "EAGLE3_LEASE_RECORDS"
# "AssertionError: what is wrong", whatever stands before it.
_ERROR_LINE = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): \S.*")
_MOST_ERRORS = 3
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}


def avoid_multicast() -> None:
    """In a process that starts workers of several GPUs: they do without NVLink multicast, unless variables say so.

    It needs a service that not every host runs.
    """
    for name, value in _MULTICAST_OFF.items():
        os.environ.setdefault(name, value)


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a Python process that this one starts: whose modules do not depend on the folder in which it was called."""
    return {**os.environ, "PYTHONSAFEPATH": "1", **variables}


def process_started(pid: int) -> float | None:
    """When a process started, in seconds since the epoch; `None` if there is none of this pid."""
    try:
        return psutil.Process(pid).create_time()
    except psutil.NoSuchProcess:
        return None


def session_record(holder: str) -> str:
    """One line about this process and its session, from which a stranger can tell what is left of it."""
    session = os.getsid(0)
    record = {
        "holder": holder,
        "pid": os.getpid(),
        "session": session,
        "session_started": process_started(session),
        "since": time.time(),
    }
    return json.dumps(record) + "\n"


def join_lease() -> None:
    """In a worker: from here on it ends when the process that runs it does.

    It also adds itself to the records of the devices that were leased for it: a worker that outlived a killed run would
    use a device whose lease is free.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for path in filter(None, os.environ.get(LEASE_RECORDS, "").split(os.pathsep)):
        with open(path, "a") as file:
            file.write(session_record("a worker"))


def claim_stdout() -> TextIO:
    """In a worker: joins the lease, returns the event stream, sends all that libraries print to standard error."""
    join_lease()
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    return events


def emit(stream: TextIO, event: str, **fields: Any) -> None:
    """Writes one event line."""
    stream.write(json.dumps({"event": event, **fields}) + "\n")


def log_tail(path: Path, num_lines: int = 30) -> str:
    """The last lines of a log file, indented, for an error message."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            lines = deque(file, maxlen=num_lines)
    except OSError as error:
        return f"  (no log: {error})"
    return "".join(f"  | {line.rstrip()}\n" for line in lines)


def log_end(path: Path, num_lines: int = 30) -> str:
    """The last lines of a log file, and before them the last errors that scrolled out of them.

    Where a process reports that its child failed, the reason is the child's own error, many lines further up.
    """
    tail, errors = deque[str](maxlen=num_lines), dict[str, None]()
    with contextlib.suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if len(tail) == num_lines and (found := _ERROR_LINE.search(tail[0])):
                errors.pop(found.group(), None)
                errors[found.group()] = None
            tail.append(line)
    told = "".join(f"  ! {error.rstrip()}\n" for error in list(errors)[-_MOST_ERRORS:])
    return told + log_tail(path, num_lines)


def run_worker(
    module: str,
    spec: dict[str, Any],
    folder: Path,
    on_event: EventHandler,
    error: type[Eagle3Error],
    what: str,
    environment: dict[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> dict[str, Any]:
    """Runs `python -m module spec.json` in a process group of its own and returns its `result` event.

    Args:
        module: a module whose main reads the spec file and emits events; a `result` event is its answer.
        spec: the JSON spec.
        folder: where the spec and the log go.
        on_event: called for every event but `result` and `error`.
        error: raised when the worker fails.
        what: names the work in the message.
        environment: variables added to this process's.
        launcher: a module that runs the worker, and its arguments before the spec file.

    Raises:
        Eagle3Error: of type `error`, with the worker's own message or its log's tail.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = module.rsplit(".", 2)[-2]
    spec_path, log_path = folder / f"{name}.spec.json", folder / f"{name}.log"
    spec_path.write_text(json.dumps(spec, indent=2))
    result: dict[str, Any] | None = None
    message = ""
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *(launcher or (module,)), str(spec_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
            env=child_environment(environment or {}),
        )
        try:
            for line in process.stdout or ():
                event = _parse(line)
                if event["event"] == "result":
                    result = event
                elif event["event"] == "error":
                    message = event["message"]
                else:
                    on_event(event)
            code = process.wait()
        finally:
            terminate_group(process)
    if code or result is None:
        detail = message or f"exit code {code}; the end of {log_path}:\n{log_end(log_path)}"
        raise error(f"{what} failed: {detail}")
    return result


def _parse(line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
        if isinstance(event, dict) and "event" in event:
            return event
    except ValueError:
        pass
    return {"event": "log", "message": line.rstrip()}


def terminate_group(process: subprocess.Popen) -> None:
    """Ends a worker started in its own session: SIGTERM, a grace period, SIGKILL to what is left of the group."""
    with contextlib.suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERMINATION_GRACE_S)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
