"""Talks to an engine host."""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from eagle3_pipeline import errors
from eagle3_pipeline.engine.jobs import GenerateJob
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import Eagle3Error, EngineDiedError, EngineError, EngineSilentError, EngineStoppedError
from eagle3_pipeline.workers import log_end

# vLLM takes a moment to end its processes.
_LAST_WORDS_S = 30.0
# Longer than a host takes for any answer but that of a job, even beside work that fills its machine.
_ANSWER_S = 60.0
EventHandler = Callable[[dict[str, Any]], None]


def ignore_event(_event: dict[str, Any]) -> None:
    """Drops progress."""


class EngineClient:
    """One connection; the engine does not retire while it is open.

    Attributes:
        started: whether this client's `acquire` started the engine.
        waited_s: seconds from `acquire` to the connection: the start, or next to nothing.
        smoke: what the engine's smoke test found.
        num_others: clients that the engine had already when this one connected.
        host: which host answers.
        folder: the engine's state folder.
    """

    def __init__(self, state: EngineState) -> None:
        self.started = False
        self.waited_s = 0.0
        self.smoke: dict[str, Any] = {}
        self.num_others = 0
        self._state = state
        self.host = state.host()
        self.folder = state.folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(state.socket))
        except OSError as error:
            self._socket.close()
            raise EngineError(f"no engine answers at {state.socket}: {error}") from error
        self._file = self._socket.makefile("r", encoding="utf-8")

    @property
    def may_sample(self) -> bool:
        """Whether the engine's smoke test found sampling plausible."""
        return bool(self.smoke.get("may_sample"))

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnects; a running job of this client is cancelled by the host."""
        with contextlib.suppress(OSError):
            self._file.close()
            self._socket.close()

    def generate(self, job: GenerateJob, on_event: EventHandler = ignore_event) -> dict[str, Any]:
        """Runs a chunk.

        Raises:
            EngineError: the engine died (with its log's tail) or refused.
            CaptureError, DiskSpaceError: as the host raised them.
        """
        return self.request("generate", on_event, timeout_s=None, **asdict(job))

    def request(
        self,
        operation: str,
        on_event: EventHandler = ignore_event,
        timeout_s: float | None = _ANSWER_S,
        **fields: Any,
    ) -> dict[str, Any]:
        """Sends one request and waits for its result, as long as `timeout_s` for each line of the answer.

        Raises:
            EngineError: the engine died, refused or does not answer.
        """
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(json.dumps({"op": operation, **fields}).encode() + b"\n")
            for line in self._file:
                event = json.loads(line)
                if event["event"] == "result":
                    return event
                if event["event"] == "error" and event["kind"] == EngineDiedError.__name__:
                    raise self._died(event["message"])
                if event["event"] == "error":
                    raise _error_class(event["kind"])(event["message"])
                on_event(event)
        except TimeoutError as error:
            raise EngineSilentError(
                f"the engine {self._state.describe()} (pid {self._state.read().get('pid')}) does not answer within "
                f"{timeout_s:.0f} s; if it does not recover, eagle3 engine stop ends it"
            ) from error
        except OSError as error:
            raise self._died(str(error)) from error
        raise self._died("it closed the connection")

    def _died(self, reason: str) -> EngineError:
        if self._was_stopped():
            return EngineStoppedError(
                f"the engine {self._state.describe()} was stopped while it worked (eagle3 engine stop, or its state "
                "folder was removed); run this again, and it continues"
            )
        return EngineDiedError(
            f"the engine died while it worked ({reason}); the end of {self._state.log}:\n{log_end(self._state.log)}"
        )

    def _was_stopped(self) -> bool:
        """Whether the host ended on purpose; it says so in its last words."""
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._state.host() == self.host and self._state.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        state = self._state.read()
        return not state or (self._state.host() == self.host and state.get("phase") == "stopped")


def _error_class(kind: str) -> type[Eagle3Error]:
    found = getattr(errors, kind, EngineError)
    return found if isinstance(found, type) and issubclass(found, Eagle3Error) else EngineError


def living_client(state: EngineState) -> EngineClient | None:
    """A connection to a host that answers and whose engine lives; one that is just dying accepts connections too.

    Raises:
        EngineSilentError: its process lives and does not answer.
    """
    with contextlib.ExitStack() as opened:
        try:
            client = opened.enter_context(EngineClient(state))
            info = client.request("info")
        except EngineSilentError:
            raise
        except EngineError:  # nobody listens, or it is ending
            return None
        if info["failed"]:
            return None
        client.smoke, client.num_others = info["smoke"], info["clients"] - 1
        opened.pop_all()
        return client
