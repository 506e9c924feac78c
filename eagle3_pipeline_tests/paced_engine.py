"""A backend that computes nothing and takes the time of a GPU: what else there is to do in that time can be measured.

It works in steps, first come, first served; the states of a step's sequences lie in page-aligned memory and are written
by eight threads, 64 MiB at a time, as the connector does it. `EAGLE3_PACED_TOKENS_PER_S` is its speed.
"""

import asyncio
import heapq
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.engine.backend import Answer, CaptureTarget
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline_tests.fake_engine import answer_tokens
from eagle3_pipeline_tests.page_memory import in_pages

PACED_BACKEND = "eagle3_pipeline_tests.paced_engine:PacedBackend"
STEP_TOKENS = 32_768
_GROUP_BYTES = 2**26


class PacedBackend:
    """Implements `Backend`."""

    def __init__(self) -> None:
        self._tokens_per_s = float(os.environ["EAGLE3_PACED_TOKENS_PER_S"])
        self._queue: list[tuple[int, int, list[int], CaptureTarget | None, asyncio.Future[None]]] = []
        self._arrived = asyncio.Event()
        self._numbers = itertools.count()
        self._appenders: dict[Path, ShardAppender] = {}
        self._lock = threading.Lock()
        self._writers = ThreadPoolExecutor(8)

    async def start(self, spec: EngineSpec) -> None:
        """Draws the states of a step; values from 1 to 2, which no check refuses."""
        self._geometry, self._max_shard_bytes = spec.geometry, spec.max_shard_bytes
        num_values = STEP_TOKENS * self._geometry.row_bytes // 2
        states = np.random.default_rng(0).integers(0x3F80, 0x4000, num_values, dtype=np.uint16)
        self._states = in_pages(states.tobytes())
        self._steps = asyncio.create_task(self._work())

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        capture: CaptureTarget | None,
        urgent: bool = False,
    ) -> Answer:
        """Answers when the step of the prompt is over; like vLLM, before its states are written."""
        if len(prompt_ids) > STEP_TOKENS:
            raise EngineError(f"request {request_id}: {len(prompt_ids)} tokens do not fit a step of {STEP_TOKENS}")
        tokens = answer_tokens(prompt_ids, sampling["max_tokens"])
        if request_id.startswith("smoke-"):
            if capture:
                ids = [*prompt_ids, *tokens[:-1]] if capture.include_output else prompt_ids
                self._writers.submit(self._write, capture.folder, [(capture.sequence_id, len(ids), ids_checksum(ids))])
            return Answer(tokens, "length", top_masses=[0.9] * len(tokens), top_hits=round(0.9 * len(tokens)))
        done = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (-int(urgent), next(self._numbers), prompt_ids, capture, done))
        self._arrived.set()
        await done
        return Answer(tokens, "length")

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            step, num_tokens = [], 0
            while self._queue and num_tokens + len(self._queue[0][2]) <= STEP_TOKENS:
                step.append(heapq.heappop(self._queue))
                num_tokens += len(step[-1][2])
            if not self._queue:
                self._arrived.clear()
            await asyncio.sleep(num_tokens / self._tokens_per_s)
            captured: dict[Path, list[tuple[str, int, str]]] = {}
            for _, _, ids, capture, done in step:
                if capture:
                    captured.setdefault(capture.folder, []).append((capture.sequence_id, len(ids), ids_checksum(ids)))
                if not done.done():
                    done.set_result(None)
            for folder, members in captured.items():
                self._write_all(folder, members)

    def _write_all(self, folder: Path, members: list[tuple[str, int, str]]) -> None:
        group: list[tuple[str, int, str]] = []
        for member in members:
            if group and (sum(n for _, n, _ in group) + member[1]) * self._geometry.row_bytes > _GROUP_BYTES:
                self._writers.submit(self._write, folder, group)
                group = []
            group.append(member)
        self._writers.submit(self._write, folder, group)

    def _write(self, folder: Path, members: list[tuple[str, int, str]]) -> None:
        with self._lock:
            appender = self._appenders.get(folder)
            if appender is None or not appender.is_current():
                if appender:
                    appender.close()
                appender = self._appenders[folder] = ShardAppender(folder, self._geometry, self._max_shard_bytes)
        names, lengths, checksums = zip(*members, strict=True)
        appender.append_all(names, lengths, self._states[: sum(lengths) * self._geometry.row_bytes], checksums)

    def failed(self) -> bool:
        """Never."""
        return False

    async def counters(self) -> dict[str, Any]:
        """There are none."""
        return {}

    def shutdown(self) -> None:
        """Waits for the writers."""
        self._writers.shutdown()
