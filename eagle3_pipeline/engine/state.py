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
        """The spec that the manager wrote."""
        return EngineSpec.from_json((self.folder / "spec.json").read_text())

    def prepare(self, spec: EngineSpec) -> None:
        """Makes the folder (0700) for a new host."""
        self.folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self.socket.unlink(missing_ok=True)
        (self.folder / "state.json").unlink(missing_ok=True)
        atomic.write_bytes(self.folder / "spec.json", spec.to_json().encode())

    def read(self) -> dict[str, Any]:
        """What the host last said: phase, pid, load_s, jobs; empty before it said anything."""
        try:
            return json.loads((self.folder / "state.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def claim(self) -> None:
        """In the host: takes the folder."""
        process = psutil.Process()
        record = {"phase": "waiting", "pid": process.pid, "pid_started": process.create_time(), "since": time.time()}
        atomic.write_json(self.folder / "state.json", record)

    def update(self, **fields: Any) -> None:
        """In the host: changes what clients read."""
        with contextlib.suppress(StoreError):
            if self.is_ours():
                atomic.write_json(self.folder / "state.json", {**self.read(), **fields})

    def is_ours(self) -> bool:
        """In the host: whether the folder still says so."""
        return self.read().get("pid") == os.getpid()

    def is_alive(self) -> bool:
        """Whether the host that wrote the state runs."""
        state = self.read()
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(state.get("pid", 0))
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
        return [json.loads(line) for line in (folder / STARTS_NAME).read_text().splitlines()]
    except FileNotFoundError:
        return []
