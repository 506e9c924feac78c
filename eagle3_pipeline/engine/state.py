"""State folders of engines: spec, socket, phase, log; and the ledger of engine starts."""

import contextlib
import json
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError, StoreError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.fingerprint import digest

_LONGEST_SOCKET_PATH = 100
STARTS_NAME = "starts.jsonl"
_LAST_LOAD = "last_load_s.json"
_LAST_SMOKE = "smoke.json"


class EngineState:
    """The state folder of one engine, shared by its host (which writes) and its clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "engine.log"

    @property
    def socket(self) -> Path:
        """Path of the Unix socket; in a private temporary folder where the state folder's path is too long for one."""
        path = self.folder / "engine.sock"
        if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
            return path
        private = Path(tempfile.gettempdir()) / f"eagle3-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        found = private.lstat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) != 0o700 or private.is_symlink():
            raise EngineError(f"{private} must be a folder of this user with mode 0700, for sockets; remove it")
        return private / f"{digest(str(self.folder))[:16]}.sock"

    def spec(self) -> EngineSpec:
        """The spec that the manager wrote.

        Raises:
            EngineError: there is none that can be read.
        """
        path = self.folder / "spec.json"
        try:
            return EngineSpec.from_json(path.read_text())
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise EngineError(
                f"{path} cannot be read ({error}): an engine of another version, or damage; stop it (eagle3 engine "
                f"stop) and remove {self.folder}"
            ) from error

    def describe(self) -> str:
        """One phrase for logs, whatever the folder holds."""
        try:
            return self.spec().describe()
        except EngineError:
            return f"{self.folder.name} (its spec.json cannot be read)"

    def prepare(self, spec: EngineSpec) -> None:
        """Makes the folder (0700) for a new host."""
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        if last := self.last_load_s():
            atomic.write_json(self.folder / _LAST_LOAD, last)
        (self.folder / "state.json").unlink(missing_ok=True)
        atomic.write_bytes(self.folder / "spec.json", spec.to_json().encode())

    def read(self) -> dict[str, Any]:
        """What the host last said: phase, pid, load_s, jobs; empty before it said anything that can be read."""
        found = _read_json(self.folder / "state.json")
        valid = isinstance(found, dict) and isinstance(found.get("pid"), int) and found["pid"] > 0
        return found if valid else {}

    def host(self) -> str:
        """Which host wrote the state: its pid, and when it started."""
        state = self.read()
        return f"{state.get('pid')}-{state.get('pid_started')}" if state else ""

    def last_load_s(self) -> float:
        """Seconds of the last load of this engine; 0: unknown."""
        for known in (self.read().get("load_s"), _read_json(self.folder / _LAST_LOAD)):
            if isinstance(known, int | float):
                return float(known)
        return 0.0

    def last_smoke(self) -> dict[str, Any]:
        """What the smoke test of this engine's last start found; empty: it never started."""
        found = _read_json(self.folder / _LAST_SMOKE)
        return found if isinstance(found, dict) else {}

    def keep_smoke(self, found: dict[str, Any]) -> None:
        """In the host: leaves what the smoke test found to those who ask before the next start."""
        with contextlib.suppress(StoreError):
            atomic.write_json(self.folder / _LAST_SMOKE, found)

    def claim(self) -> None:
        """In the host: takes the folder."""
        process = psutil.Process()
        record = {"phase": "waiting", "pid": process.pid, "pid_started": process.create_time(), "since": time.time()}
        atomic.write_json(self.folder / "state.json", record)

    def update(self, **fields: Any) -> bool:
        """In the host: changes what clients read; false if it could not be written (a full disk)."""
        with contextlib.suppress(StoreError):
            if self.is_ours():
                atomic.write_json(self.folder / "state.json", {**self.read(), **fields})
                return True
        return False

    def is_ours(self) -> bool:
        """In the host: whether the folder still says so."""
        return self.read().get("pid") == os.getpid()

    def is_alive(self) -> bool:
        """Whether the host that wrote the state runs."""
        state = self.read()
        if not state:
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(state["pid"])
            return process.status() != psutil.STATUS_ZOMBIE and process.create_time() == state.get("pid_started")
        return False

    def session(self) -> dict[str, Any]:
        """The host's session, as `end_session` takes it; hosts lead theirs."""
        state = self.read()
        pid = state.get("pid")
        return {"holder": "engine", "pid": pid, "session": pid, "session_started": state.get("pid_started")}

    def count_start(self, spec: EngineSpec) -> None:
        """In the host: adds this start to the ledger."""
        line = {"engine_id": self.folder.name, "spec": spec.describe(), "pid": os.getpid(), "at": time.time()}
        with (self.folder.parent / STARTS_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self, code: int) -> None:
        """In the host: the last words."""
        if self.is_ours():
            self.update(phase="stopped" if code == 0 else "failed", exit_code=code)
            self.socket.unlink(missing_ok=True)


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """The ledger of engine starts under the engines' folder."""
    try:
        lines = (folder / STARTS_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            start = json.loads(line)
            if isinstance(start, dict) and "engine_id" in start:
                found.append(start)
    return found


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
