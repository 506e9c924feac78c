"""vLLM KV connector that appends captured hidden states to shards.

vLLM's example connector keeps the states in its cache and says which requests are finished; here those of one step are
gathered together and go to the next free place of an open shard instead of a file each, and a record of the outcome of
each follows. Works with vLLM 0.24 to 0.32.
"""

import itertools
import logging
import math
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    ExampleHiddenStatesConnectorMetadata,
    extract_from_kv_cache,
)

from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.shards import Geometry

# Bytes of captured states that wait for the disk in pinned memory, of which a small machine has less to spare.
_MOST_IN_FLIGHT = min(4 * 2**30, psutil.virtual_memory().total // 16)
# Bytes that are gathered, copied and written at once; a longer sequence is alone.
_GROUP_BYTES = 64 * 2**20
_log = logging.getLogger(__name__)


class _CopyDone:
    """Stands in for a CUDA event where copies are synchronous."""

    def synchronize(self) -> None:
        """Returns at once."""

    def query(self) -> bool:
        """Whether the copy is done."""
        return True


class ShardConnector(ExampleHiddenStatesConnector):
    """Writes `<folder>/<sequence id>` requests into `<folder>/shard-*.safetensors`; others are not captured."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._geometry = Geometry(tuple(settings["layer_ids"]), settings["hidden_size"])
        self._max_shard_bytes = settings["max_shard_bytes"]
        self._appenders: dict[str, ShardAppender] = {}
        self._appenders_lock = threading.Lock()
        self._bytes_in_flight = 0
        self._freed = threading.Condition()
        # Reached when the steps before the current one are computed.
        self._computed: torch.cuda.Event | None = None

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Pins the memory of what may wait for the disk, which would hold up the steps that need it."""
        super().register_kv_caches(kv_caches)
        if self._is_tp_rank_zero and self._kv_cache.device.type == "cuda":
            num_groups = _MOST_IN_FLIGHT // _GROUP_BYTES
            # Freed at once: PyTorch keeps what it has pinned, for requests of up to as many bytes and over half of it.
            _ = [torch.empty(_GROUP_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(num_groups)]

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """The start of a step, before its computation is queued.

        What ended is copied while the step computes. Behind it the copy would hold up the few bytes of the sampled
        tokens, which travel the same way and which the engine waits for before it schedules the next step.
        """
        super().bind_connector_metadata(connector_metadata)
        if self._is_tp_rank_zero and self._kv_cache.device.type == "cuda":
            self._computed = torch.cuda.Event()
            self._computed.record()

    def get_finished_count(self) -> int:
        """How many ranks report a request as copied: the one that copies it."""
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose states are copied out of the cache, so that their blocks are free.

        With vLLM 0.24 the other ranks report a request at once, while the first one still reads its blocks.
        """
        pending = self._take_pending()
        if self._is_tp_rank_zero:
            self._submit(pending)
        sent, received = super().get_finished(finished_req_ids)
        return (sent if self._is_tp_rank_zero else None), received

    def _take_pending(self) -> list[Any]:
        """Requests that ended in this step, which the parent would copy one by one."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if not isinstance(metadata, ExampleHiddenStatesConnectorMetadata):
            return []
        pending, metadata.pending_saves = metadata.pending_saves, []
        return pending

    def _submit(self, pending: list[Any]) -> None:
        captured = []
        for one in pending:
            if os.path.dirname(one.filename):
                captured.append(one)
            else:
                self._req_copy_events[one.req_id] = _CopyDone()
        # Jobs' requests take turns; each folder's are written together.
        captured.sort(key=lambda one: os.path.dirname(one.filename))
        for group, starts in self._groups(captured):
            slots = [_slots(one.block_ids, len(one.token_ids), self._block_size) for one in group]
            lengths = [len(places) for places in slots]
            gathered = np.zeros(starts[-1] + lengths[-1], dtype=np.int64)
            for start, places in zip(starts, slots, strict=True):
                gathered[start : start + len(places)] = places
            self._reserve(len(gathered) * self._geometry.row_bytes)
            states, event = self._copy(torch.from_numpy(gathered))
            for one in group:
                self._req_copy_events[one.req_id] = event
            paths = [Path(one.filename) for one in group]
            self._executor.submit(self._write, states, event, paths, starts, lengths).add_done_callback(_log_failure)

    def _groups(self, pending: list[Any]) -> Iterator[tuple[list[Any], list[int]]]:
        """Requests that are gathered together, and the row of each; a folder's first begins a block of the disk."""
        rows, most = self._geometry.rows_of_blocks, _GROUP_BYTES // self._geometry.row_bytes
        group, starts, end, last = list[Any](), list[int](), 0, ""
        for one in pending:
            folder = os.path.dirname(one.filename)
            start = end if folder == last else math.ceil(end / rows) * rows
            # A request that was aborted has places for a part of its tokens.
            num_rows = min(len(one.token_ids), len(one.block_ids) * self._block_size)
            if group and start + num_rows > most:
                yield group, starts
                group, starts, start = [], [], 0
            group.append(one)
            starts.append(start)
            end, last = start + num_rows, folder
        if group:
            yield group, starts

    def _copy(self, slots: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """States at these places of the cache in the host's memory, once the event has happened."""
        cache = self._kv_cache
        if cache.device.type == "cpu":
            # Read in place, before the blocks are used again.
            return extract_from_kv_cache(cache, slots, len(slots)).to(torch.bfloat16), _CopyDone()
        stream, copied = self._get_copy_stream(), torch.cuda.Event()
        stream.wait_event(self._computed)
        with torch.cuda.stream(stream):
            there = slots.pin_memory().to(cache.device, non_blocking=True)
            found = extract_from_kv_cache(cache, there, len(slots)).to(torch.bfloat16)
            states = torch.empty_like(found, device="cpu", pin_memory=True)
            states.copy_(found, non_blocking=True)
        copied.record(stream)
        return states, copied

    def _write(
        self, states: torch.Tensor, event: Any, paths: list[Path], starts: list[int], lengths: list[int]
    ) -> None:
        try:
            event.synchronize()
            rows = states.contiguous().view(torch.int16).numpy()
            # Requests of several jobs may end in one step.
            for folder, members in itertools.groupby(
                zip(paths, starts, lengths, strict=True), lambda member: member[0].parent
            ):
                own, begins, counts = zip(*members, strict=True)
                names = [path.name for path in own]
                self._appender(folder).append_all(names, counts, memoryview(rows[begins[0] : begins[-1] + counts[-1]]))
        finally:
            with self._freed:
                self._bytes_in_flight -= len(states) * self._geometry.row_bytes
                self._freed.notify_all()

    def _reserve(self, num_bytes: int) -> None:
        """Stops the engine's step while the disk is further behind than the host's memory should hold."""
        with self._freed:
            self._freed.wait_for(
                lambda: not self._bytes_in_flight or self._bytes_in_flight + num_bytes <= _MOST_IN_FLIGHT
            )
            self._bytes_in_flight += num_bytes

    def _appender(self, folder: Path) -> ShardAppender:
        with self._appenders_lock:
            for gone in [name for name, appender in self._appenders.items() if not appender.is_current()]:
                self._appenders.pop(gone).close()
            if str(folder) not in self._appenders:
                self._appenders[str(folder)] = ShardAppender(folder, self._geometry, self._max_shard_bytes)
            return self._appenders[str(folder)]


def _slots(block_ids: list[int], num_tokens: int, block_size: int) -> np.ndarray:
    """Places in the cache of a request's tokens, int64 [num_tokens]."""
    # Of so few numbers NumPy makes in 5 us what takes PyTorch 20, of the engine's own thread.
    first = np.asarray(block_ids, dtype=np.int64) * block_size
    return (first[:, None] + np.arange(block_size)).ravel()[:num_tokens]


def _log_failure(written: Future) -> None:
    """The job of the host sees that no record comes; why is in the log."""
    if error := written.exception():
        _log.error("hidden states were not written", exc_info=error)
