"""Finds, starts and retires engines: an engine that runs is reused, an idle one of another spec makes room."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from eagle3_pipeline.engine.breaker import (
    CORE_KILLED_EXIT_CODE,
    distrust,
    distrusted,
    read_failures,
    record_failure,
    reset_failures,
)
from eagle3_pipeline.engine.client import EngineClient, living_client
from eagle3_pipeline.engine.lease import GpuPool, Lease, end_session
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.state import EngineState, read_starts
from eagle3_pipeline.errors import EngineError, EngineRefusedError, EngineStoppedError, WriterBusyError
from eagle3_pipeline.store import atomic
from eagle3_pipeline.workers import child_environment, log_end, log_tail

Log = Callable[[str], None]
Ask = Callable[[], None]
_POLL_S = 0.2
# For questions whose answer nobody depends on.
_POLITE_S = 5.0
_REPORT_EVERY_S = 10.0
_LONGEST_LOG_LINE = 160
# An engine makes room only after some time without work. Between two chunks of one pipeline there are moments without a
# client (with ten runs that start at once on two cores: 15 s), and two pipelines that took turns at every chunk would
# load at every chunk. As long as a load takes is the right order: whoever waits less may pay for a load too many.
_PATIENCE_S = (30.0, 120.0)
# Training and what is timed come after all chunks of their pipeline, so engines of the same model are done.
_SAME_MODEL_PATIENCE_S = 5.0


class EngineManager:
    """Engines and devices of this machine.

    Args:
        home: folder of engine states and leases (`EAGLE3_HOME`).
        num_gpus: GPUs in the pool; 0: one CPU slot.
    """

    def __init__(self, home: Path, num_gpus: int) -> None:
        self.folder = home / "engines"
        self.pool_folder = home / "devices"
        self.num_gpus = num_gpus
        self.pool = GpuPool(self.pool_folder, num_gpus)

    def acquire(
        self,
        spec: EngineSpec,
        log: Log,
        before_start: Callable[[EngineSpec], None] | None = None,
        after_chunks: bool = False,
    ) -> EngineClient:
        """A connection to an engine of this spec; starts one if none runs, or all do work and it may have more.

        Args:
            spec: which engine.
            log: takes progress lines.
            before_start: called before a new engine is started; raises if that cannot succeed.
            after_chunks: those of this verifier are done, and so are its idle engines.

        Raises:
            EngineError: it does not start; the message holds its log's tail.
        """
        asked = time.monotonic()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(self._instances(spec)) > 1:
            with atomic.exclusive(self.folder / f"{spec.engine_id}.choice", "choice of an engine", wait=True):
                found = self._choose(spec)
            if isinstance(found, EngineClient):
                log(f"reusing the engine {spec.describe()} (pid {found.request('info')['pid']})")
                return found
            spec = found
        state = EngineState(self.folder / spec.engine_id)
        make_room = partial(self.retire_idle, log, spec, spec.model_id if after_chunks else "")
        # Chunks that find it running do not wait for each other: at work its answers take time.
        if client := self._reused(spec, state, log):
            return client
        # Serialises start races; waiting here is waiting for the other starter's load.
        with self._turn(spec, state, log):
            if client := self._reused(spec, state, log):
                return client
            self._require_untripped(spec)
            if client := self._adopt(state, log, make_room):
                client.waited_s = time.monotonic() - asked
                return client
            if before_start:
                before_start(spec)
            client = self._start(spec, state, log, make_room)
            client.started, client.waited_s = True, time.monotonic() - asked
            client.smoke = client.request("info")["smoke"]
            return client

    def _reused(self, spec: EngineSpec, state: EngineState, log: Log) -> EngineClient | None:
        if client := living_client(state):
            # Whoever was sent to a start that is over now does not wait for it.
            self._mark(spec).unlink(missing_ok=True)
            log(f"reusing the engine {spec.describe()} (pid {state.read().get('pid')})")
        return client

    def rehearse(self, spec: EngineSpec, log: Log, after_chunks: bool = False) -> None:
        """Starts an engine of this spec with random weights and stops it: what does not fit fails without their load.

        Raises:
            EngineError: it does not start; the message holds its log's tail.
        """
        rehearsal = replace(spec, load_format="dummy", max_engines=1)
        with self.acquire(rehearsal, log, after_chunks=after_chunks) as client:
            client.request("shutdown")
        _wait_gone(EngineState(self.folder / rehearsal.engine_id))

    def _instances(self, spec: EngineSpec) -> list[EngineSpec]:
        """The engines of this spec that may run at a time, as the pool allows."""
        fit = self.num_gpus // spec.num_gpus if spec.num_gpus else 1
        return [replace(spec, instance=i) for i in range(max(1, min(spec.max_engines, fit)))]

    def _choose(self, spec: EngineSpec) -> EngineClient | EngineSpec:
        """Of several engines: an idle one, else one to start, else the one with the fewest clients.

        Whoever is sent to a start is marked as waiting for it, so that the next one who chooses sees that.
        """
        running: list[EngineClient] = []
        starting: list[EngineSpec] = []
        absent: list[EngineSpec] = []
        for one in self._instances(spec):
            if client := living_client(EngineState(self.folder / one.engine_id)):
                running.append(client)
            else:
                (starting if self._is_starting(one) else absent).append(one)
        least = min(running, key=lambda client: client.num_others, default=None)
        for client in running:
            if client is not least:
                client.close()
        # One that fails whenever it starts is left to those who find no other.
        sound = [one for one in absent if not read_failures(self.folder / one.engine_id).tripped]
        may_start = bool(sound) and self._has_room(spec, starting)
        if least and not (least.num_others and may_start):
            return least
        if least:
            least.close()
        chosen = (sound or absent)[0] if may_start or not starting else min(starting, key=self._num_waiting)
        self._mark_waiting(chosen)
        return chosen

    def _has_room(self, spec: EngineSpec, starting: list[EngineSpec]) -> bool:
        """Whether GPUs are free for one more engine, beside those that start and have not leased theirs yet."""
        phases = [EngineState(self.folder / one.engine_id).read().get("phase") for one in starting]
        promised = spec.num_gpus * sum(phase != "loading" for phase in phases)
        return list(self.pool.holders().values()).count(None) >= promised + spec.num_gpus

    def _is_starting(self, spec: EngineSpec) -> bool:
        try:
            with atomic.exclusive(self._start_lock(spec), "start of an engine"):
                return self._num_waiting(spec) > 0 or EngineState(self.folder / spec.engine_id).is_alive()
        except WriterBusyError:
            return True

    @contextlib.contextmanager
    def _turn(self, spec: EngineSpec, state: EngineState, log: Log) -> Iterator[None]:
        """Holds the right to start an engine of this spec; while another process does, its progress is told."""
        mark = self._mark(spec)

        def waiting(_busy: str) -> None:
            self._mark_waiting(spec)
            phase, since = state.read().get("phase", "starting"), state.read().get("since", time.time())
            elapsed = time.time() - since
            expected = self._expected_load_s(spec)
            log(f"waiting for another run's start of it: {_progress(phase, elapsed, elapsed, expected, state)}")

        what = f"start of the engine {spec.describe()}"
        try:
            with atomic.exclusive(self._start_lock(spec), what, wait=True, on_wait=waiting):
                mark.unlink(missing_ok=True)
                yield
        finally:
            mark.unlink(missing_ok=True)

    def _waiting(self, spec: EngineSpec) -> Path:
        return self.folder / f"{spec.engine_id}.waiting"

    def _mark(self, spec: EngineSpec) -> Path:
        return self._waiting(spec) / str(os.getpid())

    def _start_lock(self, spec: EngineSpec) -> Path:
        return self.folder / f"{spec.engine_id}.lock"

    def _mark_waiting(self, spec: EngineSpec) -> None:
        """Read by the starter: while somebody waits, its load goes on without it."""
        mark = self._mark(spec)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mark.touch()

    def _num_waiting(self, spec: EngineSpec) -> int:
        """How many living processes wait for this spec's start."""
        names = [path.name for path in self._waiting(spec).glob("*")]
        return sum(name.isdigit() and psutil.pid_exists(int(name)) for name in names)

    def _require_untripped(self, spec: EngineSpec) -> None:
        folder = self.folder / spec.engine_id
        failures = read_failures(folder)
        if failures.tripped:
            raise EngineRefusedError(
                f"the engine {spec.describe()} is not started again, it failed before: {failures.last}\nChange the "
                "execution settings, or run eagle3 engine reset once the cause is gone",
                folder,
            )

    def require_startable(self, spec: EngineSpec) -> None:
        """Refuses work for an engine that does not run and would not be started: cheap, before anything is read.

        Raises:
            EngineRefusedError: it failed before; the message holds its log's tail.
        """
        if not self.is_running(spec):
            self._require_untripped(spec)

    def is_running(self, spec: EngineSpec) -> bool:
        """Whether an engine of this spec is ready."""
        states = [EngineState(self.folder / one.engine_id) for one in self._instances(spec)]
        return any(state.is_alive() and state.read().get("phase") == "ready" for state in states)

    def last_smoke(self, spec: EngineSpec) -> dict[str, Any]:
        """What the last start of an engine of this spec found in its smoke test; empty: none was started."""
        found = [EngineState(self.folder / one.engine_id).last_smoke() for one in self._instances(spec)]
        return next(filter(None, found), {})

    def distrust(self, spec: EngineSpec, reason: str) -> None:
        """Remembers, until the engine is reset, that what this engine decoded was wrong."""
        for one in self._instances(spec):
            distrust(self.folder / one.engine_id, reason)

    def distrusted(self, spec: EngineSpec) -> str:
        """Why answers of this engine are not captured as it decodes them; empty: nothing is known against it."""
        found = [distrusted(self.folder / one.engine_id) for one in self._instances(spec)]
        return next(filter(None, found), "")

    def died(self, client: EngineClient, error: EngineError) -> None:
        """Tells the circuit breaker that an engine's host died at work."""
        record_failure(client.folder, str(error), deterministic=False, host=client.host)

    def worked(self, client: EngineClient) -> None:
        """Tells the circuit breaker that an engine finished a job."""
        reset_failures(client.folder)

    def _adopt(self, state: EngineState, log: Log, make_room: Ask) -> EngineClient | None:
        """Waits for a host whose starter was killed: it loads, or waits for the device, with nobody behind it."""
        if state.is_alive():
            log(f"waiting for an engine that somebody else started (pid {state.read().get('pid')})")
        while state.is_alive():
            if client := living_client(state):
                return client
            if state.read().get("phase") == "waiting":
                make_room()
            time.sleep(_POLL_S)
        return None

    def _start(self, spec: EngineSpec, state: EngineState, log: Log, make_room: Ask) -> EngineClient:
        expected_s = self._expected_load_s(spec)
        took = f"; the last load of this model took {expected_s:.0f} s" if expected_s else ""
        state.prepare(spec)
        log(f"starting an engine: {spec.describe()}; log: {state.log}{took}")
        with state.log.open("wb") as file:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "eagle3_pipeline.engine.host",
                    state.folder,
                    self.pool_folder,
                    str(self.num_gpus),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env=child_environment({"VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO")}),
            )
        try:
            return self._wait_ready(process, spec, state, log, expected_s, make_room)
        except BaseException:
            # An interrupted run takes its load along, unless others wait for it: they adopt it.
            if not self._num_waiting(spec):
                process.terminate()
            raise

    def _expected_load_s(self, spec: EngineSpec) -> float:
        """Seconds of the last load of this model, by whatever engine; 0: unknown."""
        own = EngineState(self.folder / spec.engine_id).last_load_s()
        others = (s.last_load_s() for s in self.engines() if s.spec().load_key == spec.load_key)
        return own or max(others, default=0.0)

    def _wait_ready(
        self, process: subprocess.Popen, spec: EngineSpec, state: EngineState, log: Log, load_s: float, make_room: Ask
    ) -> EngineClient:
        started = time.monotonic()
        loading_since = 0.0
        next_report = started + _REPORT_EVERY_S
        while True:
            phase = state.read().get("phase", "starting")
            if phase == "ready":
                log(f"the engine is ready after {time.monotonic() - started:.1f} s")
                return EngineClient(state)
            if process.poll() is not None and state.read().get("phase") == "stopped":
                raise EngineStoppedError(f"the engine {spec.describe()} was stopped while it loaded; run this again")
            if process.poll() is not None:
                message = (
                    f"the engine {spec.describe()} did not start (exit code {process.returncode}); "
                    f"the end of {state.log}:\n{log_end(state.log)}"
                )
                # A negative code is a signal: somebody killed it.
                own_fault = process.returncode > 0 and process.returncode != CORE_KILLED_EXIT_CODE
                record_failure(state.folder, message, deterministic=own_fault, host=state.host())
                raise EngineError(message)
            if phase == "waiting":
                make_room()
            now = time.monotonic()
            if phase == "loading":
                loading_since = loading_since or now
            if now >= next_report:
                log(_progress(phase, now - started, now - loading_since if loading_since else 0.0, load_s, state))
                next_report += _REPORT_EVERY_S
            time.sleep(_POLL_S)

    def retire_idle(self, log: Log, wanted: EngineSpec | None = None, after_chunks_of: str = "") -> None:
        """Asks engines that have been idle for long enough to exit and waits for those that do.

        Args:
            log: takes progress lines.
            wanted: the engine that needs their devices, if one does.
            after_chunks_of: `model_id` of a verifier whose chunks are done.
        """
        for state in self.engines():
            if not state.is_alive() or (wanted and state.folder.name == wanted.engine_id):
                continue
            spec = state.spec()
            shortest, longest = _PATIENCE_S
            patience = min(max(shortest, state.last_load_s()), longest)
            if spec.model_id == after_chunks_of:
                patience = min(patience, _SAME_MODEL_PATIENCE_S)
            with contextlib.suppress(EngineError), EngineClient(state) as client:
                if client.request("retire", timeout_s=_POLITE_S, idle_s=patience)["retired"]:
                    log(f"retiring the idle engine {spec.describe()}")
                    _wait_gone(state)

    def stop_all(self, log: Log) -> None:
        """Stops every engine, busy or idle, and what killed hosts left running."""
        for state in self._folders():
            if not state.is_alive():
                killed = state.read().get("phase") not in (None, "stopped", "failed")
                if killed and end_session(state.session()):
                    log(f"ended what the killed host of {state.describe()} had left")
            else:
                try:
                    with EngineClient(state) as client:
                        client.request("shutdown", timeout_s=_POLITE_S)
                except EngineError:
                    # It is loading, and answers no socket yet; or it does not answer at all.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(state.read()["pid"], signal.SIGTERM)
                _wait_gone(state)
                if state.is_alive():
                    end_session(state.session())
                log(f"stopped the engine {state.describe()}")

    def engines(self) -> list[EngineState]:
        """State folders of all engines that ever ran here, but those whose spec cannot be read."""
        found = []
        for state in self._folders():
            with contextlib.suppress(EngineError):
                state.spec()
                found.append(state)
        return found

    def _folders(self) -> list[EngineState]:
        return [EngineState(path.parent) for path in sorted(self.folder.glob("*/spec.json"))]

    def starts(self) -> list[dict[str, Any]]:
        """The ledger of engine starts."""
        return read_starts(self.folder)

    @contextlib.contextmanager
    def lease(self, count: int, holder: str, timeout_s: float, log: Log, model_id: str) -> Iterator[Lease]:
        """Devices for work without an engine (training on the chunks of `model_id`); idle engines make room first."""
        make_room = partial(self.retire_idle, log, after_chunks_of=model_id)
        make_room()
        with self.pool.acquire(count, holder, timeout_s, log, make_room) as lease:
            yield lease


def _progress(phase: str, elapsed_s: float, loading_s: float, expected_s: float, state: EngineState) -> str:
    """A line about a start: how long, how much longer by the last load, and what the engine itself said last."""
    left = f", about {expected_s - loading_s:.0f} s left" if expected_s > loading_s else ""
    said = log_tail(state.log, 1).strip(" |\n")
    return f"engine {phase} for {elapsed_s:.0f} s{left}" + (f"; its log: {said[-_LONGEST_LOG_LINE:]}" if said else "")


def _wait_gone(state: EngineState, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while state.is_alive() and time.monotonic() < deadline:
        time.sleep(_POLL_S / 4)
