"""Leases of whole GPUs (or of the one CPU slot): a lock file each, held by the process that uses the device."""

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from eagle3_pipeline.engine.devices import all_gpus, gpu_memory, visible_gpus
from eagle3_pipeline.errors import LeaseError
from eagle3_pipeline.workers import LEASE_RECORDS, process_started, session_record

_POLL_S = 0.2
_REAP_TIMEOUT_S = 30.0
# A GPU that nobody uses still shows some memory of its driver as used.
_FREE_SHARE = 0.97


@dataclass(frozen=True)
class Lease:
    """Devices held by this process.

    Attributes:
        gpus: the driver's indices; empty for the CPU slot.
        records: lock files; each holds a line of the holder and one of each worker that uses the device for it.
    """

    gpus: tuple[int, ...]
    records: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """Variables that show a child process only the leased GPUs and let a worker add itself to the records."""
        # By itself CUDA counts the fastest GPU first, the driver by place.
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        devices = shown if self.gpus else {}
        return devices | {LEASE_RECORDS: os.pathsep.join(self.records)}


class GpuPool:
    """The devices of this machine.

    Args:
        folder: where the lock files lie; one per machine.
        num_gpus: how many of the GPUs that this process may use, the first ones; 0: there is one CPU slot.
    """

    def __init__(self, folder: Path, num_gpus: int) -> None:
        self._folder = folder
        # Made-up devices, for tests, where there is no GPU.
        indices = visible_gpus()[:num_gpus] if all_gpus() else range(num_gpus)
        self._slots = [f"gpu-{i}" for i in indices] if num_gpus else ["cpu-0"]
        self._num_gpus = num_gpus

    @contextlib.contextmanager
    def acquire(
        self,
        count: int,
        holder: str,
        timeout_s: float,
        on_wait: Callable[[str], None],
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Iterator[Lease]:
        """Holds `count` GPUs (any count: the slot, on a CPU machine), all or nothing, in index order.

        Args:
            count: GPUs wanted.
            holder: what the devices are for; shown to those who wait.
            timeout_s: longest wait.
            on_wait: called with who holds what, about every 10 s of waiting.
            while_waiting: called before every further try.

        Raises:
            LeaseError: more GPUs wanted than there are, or none became free in time.
        """
        wanted = count if self._num_gpus else 1
        if wanted > len(self._slots):
            raise LeaseError(
                f"{wanted} GPUs wanted for {holder}, this machine's pool has {len(self._slots)} (the driver knows "
                f"{len(all_gpus())}; resources.num_gpus and CUDA_VISIBLE_DEVICES choose)"
            )
        files = self._wait(wanted, holder, timeout_s, on_wait, while_waiting)
        try:
            # If this fails, the records stay: the next holder looks for left-overs again.
            for file in files:
                if left := _read_records(file):
                    for record in left:
                        end_session(record)
                    self._wait_free(file, on_wait)
            try:
                for file in files:
                    _write_record(file, holder)
                indices = tuple(int(Path(f.name).stem.split("-")[1]) for f in files)
                yield Lease(indices if self._num_gpus else (), tuple(str(file.name) for file in files))
            finally:
                for file in files:
                    file.truncate(0)
        finally:
            for file in files:
                file.close()

    def holders(self) -> dict[str, dict[str, Any] | None]:
        """Who holds each slot, by slot name."""
        found: dict[str, dict[str, Any] | None] = {}
        for slot in self._slots:
            found[slot] = None
            with contextlib.suppress(FileNotFoundError), self._open(slot, "r+") as file:
                if not _try_lock(file):
                    found[slot] = next(iter(_read_records(file)), {"holder": "unknown"})
        return found

    def _wait(
        self,
        wanted: int,
        holder: str,
        timeout_s: float,
        on_wait: Callable[[str], None],
        while_waiting: Callable[[], None],
    ) -> list[IO[str]]:
        started = time.monotonic()
        next_report = started + 1.0
        while True:
            files = self._try(wanted)
            if files is not None:
                return files
            now = time.monotonic()
            if now - started > timeout_s:
                raise LeaseError(f"{holder}: no free device within {timeout_s:.0f} s; {self._who()}")
            if now >= next_report:
                on_wait(f"{holder}: waiting for {wanted} of {', '.join(self._slots)}; {self._who()}")
                next_report = now + 10.0
            while_waiting()
            time.sleep(_POLL_S)

    def _wait_free(self, file: IO[str], on_wait: Callable[[str], None]) -> None:
        """After a dead holder: its memory goes back some time after its processes."""
        deadline = time.monotonic() + _REAP_TIMEOUT_S
        index = int(Path(file.name).stem.split("-")[1])
        while (memory := gpu_memory().get(index)) and memory.free_bytes < _FREE_SHARE * memory.total_bytes:
            if time.monotonic() > deadline:
                on_wait(f"GPU {index}: {memory.free_bytes:,} of {memory.total_bytes:,} bytes are free")
                return
            time.sleep(_POLL_S)

    def _try(self, wanted: int) -> list[IO[str]] | None:
        self._folder.mkdir(parents=True, exist_ok=True)
        files: list[IO[str]] = []
        for slot in self._slots:
            file = self._open(slot, "a+")
            if _try_lock(file):
                files.append(file)
                if len(files) == wanted:
                    return files
            else:
                file.close()
        for file in files:
            file.close()
        return None

    def _open(self, slot: str, mode: str) -> IO[str]:
        # Whatever bytes a crash left there.
        return (self._folder / f"{slot}.lock").open(mode, errors="replace")

    def _who(self) -> str:
        held = [f"{slot} is held by {r['holder']} (pid {r.get('pid')})" for slot, r in self.holders().items() if r]
        return "; ".join(held) or "all are free now"


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_records(file: IO[str]) -> list[dict[str, Any]]:
    file.seek(0)
    records = []
    for line in file:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def _write_record(file: IO[str], holder: str) -> None:
    file.seek(0)
    file.truncate()
    file.write(session_record(holder))
    file.flush()


def end_session(record: dict[str, Any]) -> bool:
    """Ends what a dead holder left running: vLLM's workers do not inherit the lock but share its session.

    Only a session that the holder led is ended: another one is a login shell's or a daemon's. A living process whose
    pid equals the session id but which started at another time is a stranger that reuses the pid.

    Returns:
        Whether there was anything to end.
    """
    session = record.get("session")
    if not isinstance(session, int) or session <= 0 or session != record.get("pid") or session == os.getsid(0):
        return False
    leader_started = process_started(session)
    if leader_started is not None and leader_started != record.get("session_started"):
        return False
    found = False
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while left := [pid for pid in psutil.pids() if _session_of(pid) == session and pid != os.getpid()]:
        if time.monotonic() > deadline:
            raise LeaseError(f"processes {left} of the dead holder {record.get('holder')} cannot be ended")
        found = True
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return found


def _session_of(pid: int) -> int | None:
    try:
        zombie = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        return None if zombie else os.getsid(pid)
    except (ProcessLookupError, psutil.NoSuchProcess, PermissionError):
        return None
