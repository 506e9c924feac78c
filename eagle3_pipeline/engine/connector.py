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
from dataclasses import dataclass
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
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline.store.shards import Geometry

# Bytes of captured states that wait for the disk in pinned memory, of which a small machine has less to spare.
_MOST_IN_FLIGHT = min(4 * 2**30, psutil.virtual_memory().total // 16)
# Bytes that are gathered, copied and written at once; a longer sequence is alone.
_GROUP_BYTES = 64 * 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Ended:
    """A request whose states are to be copied: where they go to, how many rows there are, the blocks that have them.

    `ids` is the checksum of its tokens.
    """

    req_id: str
    folder: str
    sequence_id: str
    num_rows: int
    block_ids: list[int]
    ids: str


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

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Whether the blocks of a request that ended are still needed. vLLM's scheduler asks, the worker copies.

        One that was aborted before it was scheduled has no path, for which vLLM 0.24 itself would end the engine.
        """
        folder, sequence_id = os.path.split(self._request_filenames.pop(request.request_id, ""))
        if not folder:
            return False, None
        include_output = (request.kv_transfer_params or {}).get("include_output_tokens", False)
        # Of the last sampled token nothing was computed. An aborted request has places for a part of its tokens.
        num_tokens = request.num_tokens - 1 if include_output else request.num_prompt_tokens
        num_rows = min(num_tokens, len(block_ids) * self._block_size)
        ids = ids_checksum(request.all_token_ids[:num_rows])
        ended = _Ended(request.request_id, folder, sequence_id, num_rows, list(block_ids), ids)
        self._pending_saves[request.request_id] = ended
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose states are copied out of the cache, so that their blocks are free.

        With vLLM 0.24 the other ranks would report a request at once, while the first one still reads its blocks.
        """
        if not self._is_tp_rank_zero:
            return None, None
        self._submit(self._take_pending())
        copied = {name for name, event in self._req_copy_events.items() if event.query()}
        for name in copied:
            del self._req_copy_events[name]
        return copied or None, None

    def _take_pending(self) -> list[_Ended]:
        """Requests that ended with the last step."""
        metadata = self._get_connector_metadata() if self.has_connector_metadata() else None
        if not isinstance(metadata, ExampleHiddenStatesConnectorMetadata):
            return []
        pending, metadata.pending_saves = metadata.pending_saves, []
        return pending

    def _submit(self, ended: list[_Ended]) -> None:
        # Jobs' requests take turns; each folder's are written together.
        ended.sort(key=lambda one: one.folder)
        for group, starts in self._groups(ended):
            gathered = np.zeros(starts[-1] + group[-1].num_rows, dtype=np.int64)
            for one, start in zip(group, starts, strict=True):
                gathered[start : start + one.num_rows] = _slots(one, self._block_size)
            self._reserve(len(gathered) * self._geometry.row_bytes)
            states, event = self._copy(torch.from_numpy(gathered))
            for one in group:
                self._req_copy_events[one.req_id] = event
            self._executor.submit(self._write, states, event, group, starts).add_done_callback(_log_failure)

    def _groups(self, ended: list[_Ended]) -> Iterator[tuple[list[_Ended], list[int]]]:
        """Requests that are gathered together, and the row of each; a folder's first begins a block of the disk."""
        rows, most = self._geometry.rows_of_blocks, _GROUP_BYTES // self._geometry.row_bytes
        group, starts, end, last = list[_Ended](), list[int](), 0, ""
        for one in ended:
            start = end if one.folder == last else math.ceil(end / rows) * rows
            if group and start + one.num_rows > most:
                yield group, starts
                group, starts, start = [], [], 0
            group.append(one)
            starts.append(start)
            end, last = start + one.num_rows, one.folder
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

    def _write(self, states: torch.Tensor, event: Any, group: list[_Ended], starts: list[int]) -> None:
        try:
            event.synchronize()
            rows = states.contiguous().view(torch.int16).numpy()
            # Requests of several jobs may end in one step.
            for folder, members in itertools.groupby(zip(group, starts, strict=True), lambda member: member[0].folder):
                own, begins = zip(*members, strict=True)
                names = [one.sequence_id for one in own]
                counts = [one.num_rows for one in own]
                data = memoryview(rows[begins[0] : begins[-1] + counts[-1]])
                self._appender(Path(folder)).append_all(names, counts, data, [one.ids for one in own])
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


def _slots(ended: _Ended, block_size: int) -> np.ndarray:
    """Places in the cache of a request's tokens, int64 [num_rows]."""
    # Of so few numbers NumPy makes in 5 us what takes PyTorch 20, of the engine's own thread.
    first = np.asarray(ended.block_ids, dtype=np.int64) * block_size
    return (first[:, None] + np.arange(block_size)).ravel()[: ended.num_rows]


def _log_failure(written: Future) -> None:
    """The job of the host sees that no record comes; why is in the log."""
    if error := written.exception():
        _log.error("hidden states were not written", exc_info=error)
