"""A backend without a model: tokens and states follow from token ids, so that tests can work them out again.

`EAGLE3_ENGINE_BACKEND=eagle3_pipeline_tests.fake_engine:FakeBackend` puts it behind the real host. Variables, read when
the host starts:

- `EAGLE3_FAKE_LOAD_S`: seconds of loading; default 0.
- `EAGLE3_FAKE_DELAY_S`: seconds of an answer; default 0.
- `EAGLE3_FAKE_FAIL`: `start` (loading raises), `dummy` (loading random weights raises), `write_error`, `disk_full`
  (the writer loses every sequence), `short_capture` (one row is missing), `preempted` (no rows are left of a sequence
  the first time), `no_rows` (nor ever), `generate` (requests end without an answer), `garbage` (the smoke test finds
  sampling implausible), `wrong_decoding` (states of decoded tokens are others'). `FAIL:TEXT` fails only requests
  whose sequence id holds TEXT; `smoke` is in those of the smoke test only.
- `EAGLE3_FAKE_LOG`: a file that gets one line per finished request and one per aborted request.
- `EAGLE3_FAKE_CORE`: if set, the engine has a core: a child process in the host's session that outlives a killed host.
  Without it every request fails, as vLLM's do once its `EngineCore` is dead.
- `EAGLE3_FAKE_GATES`: a folder of gates. At a point the engine leaves the file `POINT.reached` there and stays while
  `POINT.closed` exists. Points: `host` (before the lease), `core` (the core has just started), `loading`, and
  `answers`, whose `.closed` file holds the number of requests that pass nevertheless.
"""

import asyncio
import contextlib
import errno
import json
import os
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.engine.backend import Answer, CaptureTarget
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline.store.shards import RECORDS_NAME, ShardRecord

FAKE_BACKEND = "eagle3_pipeline_tests.fake_engine:FakeBackend"
DEFAULT_VOCAB = 100


def next_token(ids: Sequence[int], vocab_size: int = DEFAULT_VOCAB) -> int:
    """The greedy answer to `ids`: 31 x the last token + 7 x the one before + 11, modulo the vocabulary."""
    before = ids[-2] if len(ids) > 1 else 0
    return (31 * ids[-1] + 7 * before + 11) % vocab_size


def answer_tokens(
    prompt: Sequence[int], max_tokens: int, stop: Sequence[int] = (), vocab_size: int = DEFAULT_VOCAB
) -> list[int]:
    """All sampled tokens, the stop token included."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_token(ids, vocab_size))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


def state_bits(ids: Sequence[int] | np.ndarray, layer_ids: Sequence[int], hidden_size: int) -> np.ndarray:
    """States as bf16 bits [n, layers, H]: whole numbers from 1 to 251, which bf16 holds exactly."""
    tokens = np.asarray(ids, dtype=np.int64)[:, None, None]
    layers = np.asarray(layer_ids, dtype=np.int64)[None, :, None]
    columns = np.arange(hidden_size, dtype=np.int64)[None, None, :]
    values = (7 * tokens + 13 * layers + 3 * columns) % 251 + 1
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2")


def accepted_tokens(step: int, num_speculative_tokens: int) -> int:
    """Draft tokens that draft step `step` (from 0) of a request accepts: 0, 1, ..., all, 0, 1, ..."""
    return step % (num_speculative_tokens + 1)


def at_closed_gate(point: str) -> bool:
    """Leaves the mark of having been at a point; whether to stay there."""
    folder = os.environ.get("EAGLE3_FAKE_GATES")
    if not folder:
        return False
    with contextlib.suppress(FileNotFoundError):  # the test that made the folder is over
        (Path(folder) / f"{point}.reached").touch()
    return (Path(folder) / f"{point}.closed").exists()


def wait_at_gate(point: str) -> None:
    """Stays at a point while its gate is closed."""
    while at_closed_gate(point):
        time.sleep(0.02)


def _passing_requests() -> int:
    """How many requests pass the closed gate `answers`."""
    folder = os.environ.get("EAGLE3_FAKE_GATES")
    try:
        return int((Path(folder) / "answers.closed").read_text()) if folder else 0
    except FileNotFoundError:
        return 0


class FakeCoreDeadError(Exception):
    """As vLLM's `EngineDeadError`: none of ours, and raised by every request from then on."""


class _PatientServer:
    """A server whose end is waited for, as in Python 3.12, while a connection stays open."""

    def __init__(self, server: asyncio.Server) -> None:
        self.close = server.close

    async def wait_closed(self) -> None:
        await asyncio.Event().wait()


async def _start_patient_server(*args: Any, **kwargs: Any) -> _PatientServer:
    return _PatientServer(await _start_unix_server(*args, **kwargs))


_start_unix_server = asyncio.start_unix_server


class FakeBackend:
    """Implements `Backend`."""

    def __init__(self) -> None:
        wait_at_gate("host")
        self._core: subprocess.Popen | None = None
        self._num_requests = 0
        self._busy_s = 0.0
        self._delay_s = float(os.environ.get("EAGLE3_FAKE_DELAY_S", "0"))
        self._fail, _, self._fail_only = os.environ.get("EAGLE3_FAKE_FAIL", "").partition(":")
        self._log = os.environ.get("EAGLE3_FAKE_LOG", "")
        self._spec: EngineSpec | None = None
        self._vocab_size = DEFAULT_VOCAB
        self._appenders: dict[Path, ShardAppender] = {}
        self._written: set[str] = set()
        # One thread, as the order of records then is the order of requests.
        self._writer = ThreadPoolExecutor(1)
        self._counters: dict[str, Any] = {}

    async def start(self, spec: EngineSpec) -> None:
        """Waits as a load would."""
        if os.environ.get("EAGLE3_FAKE_WAIT_CLOSED"):
            asyncio.start_unix_server = _start_patient_server  # type: ignore[assignment]
        if os.environ.get("EAGLE3_FAKE_CORE"):
            self._core = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL)
        await self._pass_gate("core")
        await self._pass_gate("loading")
        await asyncio.sleep(float(os.environ.get("EAGLE3_FAKE_LOAD_S", "0")))
        if self._fail == "start" or (self._fail == "dummy" and spec.load_format == "dummy"):
            raise RuntimeError("the fake engine was told not to start")
        self._spec = spec
        config = Path(spec.model_path) / "config.json"
        if config.exists():
            self._vocab_size = json.loads(config.read_bytes()).get("vocab_size", DEFAULT_VOCAB)
        zeros = [0] * spec.num_speculative_tokens
        self._counters = {"num_drafts": 0, "num_draft_tokens": 0, "accepted_per_position": zeros}

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        capture: CaptureTarget | None,
        urgent: bool = False,
    ) -> Answer:
        """Answers; like vLLM, it returns before its writer thread is done."""
        if request_id.startswith("smoke-"):
            return self._smoke_answer(prompt_ids, sampling, capture)
        self._num_requests += 1
        try:
            if self._num_requests > _passing_requests():
                await self._pass_gate("answers")
            self._require_core()
            await asyncio.sleep(self._delay_s)
        except asyncio.CancelledError:
            self._note(f"aborted {request_id}")
            raise
        started = time.monotonic()
        try:
            return self._answer(request_id, prompt_ids, sampling, capture)
        finally:
            self._busy_s += time.monotonic() - started

    def _answer(
        self, request_id: str, prompt_ids: list[int], sampling: dict[str, Any], capture: CaptureTarget | None
    ) -> Answer:
        if self._fails("generate", request_id):
            raise EngineError(f"request {request_id} ended without an answer")
        stop = sampling.get("stop_token_ids") or ()
        tokens = answer_tokens(prompt_ids, sampling["max_tokens"], stop, self._vocab_size)
        if capture:
            rows = [*prompt_ids, *tokens[:-1]] if capture.include_output else prompt_ids
            self._writer.submit(self._write, capture, rows, len(prompt_ids))
        self._count_drafts(len(tokens))
        self._note(f"finished {request_id}")
        logprobs = sampling.get("logprobs")
        return Answer(
            tokens,
            "stop" if tokens[-1] in stop else "length",
            -0.25 * len(tokens) if logprobs is not None else None,
            [1.5] * len(tokens) if (logprobs or 0) >= 2 else None,
        )

    def failed(self) -> bool:
        """Whether the core is dead."""
        return self._core is not None and self._core.poll() is not None

    async def counters(self) -> dict[str, Any]:
        """Draft steps so far, if there is a draft; `busy_s`: seconds of making answers, without what wrote states."""
        return self._counters | {"busy_s": self._busy_s}

    def shutdown(self) -> None:
        """Waits for the writer."""
        self._writer.shutdown()
        if self._core:
            self._core.kill()

    async def _pass_gate(self, point: str) -> None:
        closed = True
        while closed:
            # In this order: who killed the core opens the gate afterwards.
            closed = at_closed_gate(point)
            self._require_core()
            await asyncio.sleep(0.02 if closed else 0)

    def _require_core(self) -> None:
        if self._core and self._core.poll() is not None:
            raise FakeCoreDeadError(f"the fake engine's core died (exit code {self._core.returncode})")

    def _smoke_answer(self, prompt_ids: list[int], sampling: dict[str, Any], capture: CaptureTarget | None) -> Answer:
        """Nine in ten sampled tokens are likely ones, or none is (`EAGLE3_FAKE_FAIL=garbage`)."""
        tokens = answer_tokens(prompt_ids, sampling["max_tokens"], (), self._vocab_size)
        if capture:
            rows = [*prompt_ids, *tokens[:-1]] if capture.include_output else prompt_ids
            self._writer.submit(self._write_states, capture, rows, len(prompt_ids))
        hits = 0 if self._fail == "garbage" else round(0.9 * len(tokens))
        masses = [0.9] * len(tokens)
        return Answer(tokens, "length", top_masses=masses, top_hits=hits)

    def _fails(self, kind: str, name: str) -> bool:
        return self._fail == kind and self._fail_only in name

    def _note(self, line: str) -> None:
        if self._log:
            with open(self._log, "a") as file:
                file.write(line + "\n")

    def _write(self, capture: CaptureTarget, rows: list[int], num_prompt: int) -> None:
        assert self._spec is not None
        for kind, number in (("write_error", errno.EIO), ("disk_full", errno.ENOSPC)):
            if self._fails(kind, capture.sequence_id):
                error = OSError(number, os.strerror(number))
                record = ShardRecord(capture.sequence_id, num_tokens=len(rows), error=f"OSError: {error}")
                with (capture.folder / RECORDS_NAME).open("a") as file:
                    file.write(json.dumps(asdict(record)) + "\n")
                return
        if self._fails("short_capture", capture.sequence_id):
            rows = rows[:-1]
        first_time = capture.sequence_id not in self._written
        self._written.add(capture.sequence_id)
        if self._fails("no_rows", capture.sequence_id) or (
            first_time and self._fails("preempted", capture.sequence_id)
        ):
            rows = []
        self._write_states(capture, rows, num_prompt)

    def _write_states(self, capture: CaptureTarget, rows: list[int], num_prompt: int) -> None:
        assert self._spec is not None
        bits = state_bits(rows, self._spec.layer_ids, self._spec.hidden_size)
        if self._fails("wrong_decoding", capture.sequence_id):
            # The states of decoded tokens are those of others.
            bits[num_prompt:] = state_bits(
                [token + 100 for token in rows], self._spec.layer_ids, self._spec.hidden_size
            )[num_prompt:]
        self._appender(capture.folder).append(capture.sequence_id, bits.data, ids_checksum(rows))

    def _appender(self, folder: Path) -> ShardAppender:
        assert self._spec is not None
        known = self._appenders.get(folder)
        if known is None or not known.is_current():
            if known:
                known.close()
            self._appenders[folder] = ShardAppender(folder, self._spec.geometry, self._spec.max_shard_bytes)
        return self._appenders[folder]

    def _count_drafts(self, num_tokens: int) -> None:
        """The first token comes from the prefill; every later verifier step gives one token and what it accepts."""
        assert self._spec is not None
        depth, left, step = self._spec.num_speculative_tokens, num_tokens - 1, 0
        while self._spec.draft_path and left > 0:
            accepted = min(accepted_tokens(step, depth), left)
            self._counters["num_drafts"] += 1
            self._counters["num_draft_tokens"] += depth
            for position in range(accepted):
                self._counters["accepted_per_position"][position] += 1
            left -= accepted + 1
            step += 1
