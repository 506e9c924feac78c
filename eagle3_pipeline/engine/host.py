"""The engine host: a process of its own that leases the devices, loads the verifier and serves a Unix socket.

One line of JSON is one request: `{"op": "info" | "generate" | "counters" | "retire" | "shutdown", ...}`. Answers are
lines too: any number of `progress` events, then one `result` or `error`. A client that disconnects cancels its job.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

from eagle3_pipeline.engine.backend import Backend
from eagle3_pipeline.engine.breaker import CORE_KILLED_EXIT_CODE
from eagle3_pipeline.engine.jobs import GenerateJob, run_job
from eagle3_pipeline.engine.lease import GpuPool
from eagle3_pipeline.engine.reaper import start_reaper
from eagle3_pipeline.engine.smoke import smoke_test
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import Eagle3Error, EngineDiedError, EngineError

logger = logging.getLogger("eagle3.engine.host")
_LINE_LIMIT = 1 << 20
_WATCH_S = 1.0
# vLLM names the core processes that ended during a start with their exit codes; negative ones are signals. It may look
# before there is a code, and name none: that start gets the benefit of the doubt.
_CORE_KILLED = re.compile(r"\bcore\b.*(?:-(?:9|15)\b|core proc\(s\): \{\})", re.IGNORECASE | re.DOTALL)
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Host:
    """Serves one backend until it is idle for too long, told to stop, or its state folder disappears."""

    def __init__(self, spec: EngineSpec, backend: Backend, state: EngineState) -> None:
        self._spec = spec
        self._backend = backend
        self._state = state
        self._clients = 0
        self._jobs = 0
        self._idle_since = time.monotonic()
        self._stop = asyncio.Event()
        # Set by a request, acted on once its answer is sent.
        self._stopping = False
        self._smoke: dict[str, Any] = {}
        self._ready: dict[str, Any] = {}

    async def serve(self) -> None:
        """Loads the model, then answers until the end."""
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        await self._load()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self._stop.set)
        load_s = round(time.monotonic() - started, 3)
        if not self._state.is_ours():
            raise EngineError("another host took this engine's state folder while it loaded")
        server = await asyncio.start_unix_server(self._client, str(self._state.socket), limit=_LINE_LIMIT)
        os.chmod(self._state.socket, 0o600)
        self._idle_since = time.monotonic()
        self._ready = {"phase": "ready", "load_s": load_s, "smoke": self._smoke}
        logger.info("ready after %.1f s: %s", load_s, self._spec.describe())
        try:
            await self._watch()
        finally:
            # Without waiting for its connections to end, as Python 3.12 would: clients of a busy engine keep theirs.
            server.close()
        if self._backend.failed():
            raise EngineDiedError("the engine's core died")

    async def _load(self) -> None:
        """Loads the model. vLLM blocks the loop while it loads, so the time limit acts from outside."""
        limit = self._spec.start_timeout_s
        reason = f"resources.start_timeout_s ({limit:.0f} s) is over"
        timer = threading.Timer(limit, _abandon, [self._state, reason, 1])
        timer.daemon = True
        timer.start()
        try:
            await self._backend.start(self._spec)
            self._smoke = await smoke_test(self._backend, self._spec)
            self._state.keep_smoke(self._smoke)
            if fault := self._smoke["decoding_fault"]:
                logger.warning("this engine captures by prefill only: %s", fault)
            # What was imported stays; to walk over it takes half a second, and this thread serves all requests.
            gc.collect()
            gc.freeze()
        finally:
            timer.cancel()

    async def _watch(self) -> None:
        while not self._stop.is_set():
            # Whoever waits for this load reads it from the state: on a full disk it is told later, not never.
            if self._ready and self._state.update(**self._ready):
                self._ready = {}
                self._idle_since = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _WATCH_S)
            if self._backend.failed():
                return
            idle = time.monotonic() - self._idle_since
            if not self._clients and not self._ready and idle > self._spec.idle_timeout_s:
                logger.info("idle for %.0f s", idle)
                return
            if not self._state.is_ours():
                logger.info("the state folder is gone or belongs to another host")
                return

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            while line := await reader.readline():
                await self._request(json.loads(line), reader, writer)
        except (ConnectionError, ValueError) as error:
            logger.warning("client dropped: %s", error)
        except asyncio.CancelledError:
            # The host ends; asyncio would log that as a failure, over what the log is read for.
            logger.info("client dropped: the host ends")
        finally:
            self._clients -= 1
            writer.close()

    async def _request(
        self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async def send(event: dict[str, Any]) -> None:
            # What uvloop raises of a closed stream is no ConnectionError.
            if writer.is_closing():
                raise ConnectionError("it disconnected before its answer")
            writer.write(json.dumps(event).encode() + b"\n")
            await writer.drain()

        work = asyncio.create_task(self._answer(request, send))
        # A client sends nothing while it waits, so any end of its stream means that it left.
        gone = asyncio.create_task(reader.read(1))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                raise ConnectionError("it disconnected while its job ran")
        finally:
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        try:
            await send({**work.result(), "event": "result"})
            if self._stopping:
                self._stop.set()
        except Eagle3Error as error:
            await send({"event": "error", "kind": type(error).__name__, "message": str(error)})
        except ConnectionError:
            raise
        except Exception as error:  # whatever the engine raises is the client's answer; the log has the traceback
            logger.exception("request failed")
            kind = EngineDiedError if self._backend.failed() else EngineError
            await send({"event": "error", "kind": kind.__name__, "message": f"{type(error).__name__}: {error}"})
            if kind is EngineDiedError:
                self._stop.set()

    async def _answer(self, request: dict[str, Any], send: Any) -> dict[str, Any]:
        operation = request.pop("op", None)
        if operation == "info":
            facts = {"pid": os.getpid(), "jobs": self._jobs, "clients": self._clients, "spec": self._spec.describe()}
            return facts | {"smoke": self._smoke, "failed": self._backend.failed()}
        if operation == "counters":
            return await self._backend.counters()
        if operation == "generate":
            return await self._generate(GenerateJob(**request), send)
        if operation == "retire":
            # The asking client itself is connected.
            idle_s = time.monotonic() - self._idle_since
            self._stopping = self._clients <= 1 and idle_s >= request["idle_s"]
            return {"retired": self._stopping}
        if operation == "shutdown":
            self._stopping = True
            return {"retired": True}
        raise Eagle3Error(f"unknown operation {operation!r}")

    async def _generate(self, job: GenerateJob, send: Any) -> dict[str, Any]:
        self._jobs += 1
        self._state.update(jobs=self._jobs)
        try:
            return await run_job(job, self._backend, self._spec, uuid.uuid4().hex[:8], send)
        finally:
            # Work alone counts: those who only look, or wait for the device, do not keep an engine alive.
            self._idle_since = time.monotonic()


def _abandon(state: EngineState, reason: str, code: int) -> None:
    """Ends a host that does not serve yet, and all that it started."""
    logger.error("%s while loading; giving up", reason)
    state.close(code)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def load_backend(name: str) -> Backend:
    """Instantiates `module:Class`."""
    module, _, class_name = name.partition(":")
    return getattr(importlib.import_module(module), class_name)()


def _report_wait(state: EngineState) -> Callable[[str], None]:
    def report(message: str) -> None:
        logger.info(message)
        if not state.is_ours():
            raise EngineError("another host took this engine's state folder while this one waited for a device")

    return report


def main() -> None:
    """Entry point: `python -m eagle3_pipeline.engine.host STATE_FOLDER POOL_FOLDER POOL_GPUS`."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("state", type=Path)
    parser.add_argument("pool", type=Path)
    parser.add_argument("pool_gpus", type=int)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    state = EngineState(arguments.state)
    spec = state.spec()
    state.claim()
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda received, _frame: _abandon(state, signal.Signals(received).name, 0))
    start_reaper(state.session())
    pool = GpuPool(arguments.pool, arguments.pool_gpus)
    backend = load_backend(spec.backend)
    code = 1
    try:
        holder = f"engine {spec.describe()}"
        with pool.acquire(spec.num_gpus, holder, spec.lease_timeout_s, _report_wait(state)) as lease:
            os.environ.update(lease.environment())
            state.update(phase="loading", gpus=list(lease.gpus))
            state.count_start(spec)
            try:
                uvloop.run(Host(spec, backend, state).serve())
                code = 0
            finally:
                backend.shutdown()
    except Exception as error:  # the log's tail is what the waiting clients show
        logger.exception("the engine host failed")
        if _CORE_KILLED.search(str(error)):
            code = CORE_KILLED_EXIT_CODE
    state.close(code)
    # vLLM leaves threads behind that would keep the process alive.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
