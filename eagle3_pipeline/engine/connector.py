"""vLLM KV connector that appends captured hidden states to shards.

vLLM's example connector already gathers a finished request's states from the cache; here they go to the next free
place of an open shard instead of a file each, and a record of the outcome follows. Works with vLLM 0.24 to 0.32.
"""

import os
import threading
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)

from eagle3_pipeline.store.shards import ShardAppender

# Bytes of captured states that wait for the disk in pinned memory.
_MOST_IN_FLIGHT = 4 * 2**30


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
        self._row_bytes = self._kv_transfer_config.get_from_extra_config("row_bytes", 0)
        self._max_shard_bytes = self._kv_transfer_config.get_from_extra_config("max_shard_bytes", 0)
        self._appenders: dict[str, ShardAppender] = {}
        self._appenders_lock = threading.Lock()
        self._bytes_in_flight = 0
        self._freed = threading.Condition()

    def get_finished_count(self) -> int:
        """How many ranks report a request as copied: the one that copies it."""
        return 1

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose states are copied out of the cache, so that their blocks are free.

        With vLLM 0.24 the other ranks report a request at once, while the first one still reads its blocks.
        """
        sent, received = super().get_finished(finished_req_ids)
        return (sent if self._is_tp_rank_zero else None), received

    def _submit_async_write(self, pending: Any) -> None:
        if not os.path.dirname(pending.filename):
            if self._is_tp_rank_zero:
                self._req_copy_events[pending.req_id] = _CopyDone()
            return
        if self._is_tp_rank_zero:
            self._reserve(pending.token_ids.shape[0] * self._row_bytes)
        if self._kv_cache.device.type != "cpu":
            super()._submit_async_write(pending)
        elif self._is_tp_rank_zero:
            self._submit_from_cpu(pending)

    def _submit_from_cpu(self, pending: Any) -> None:
        """The parent's hook copies on a CUDA stream; a CPU cache is read in place, before its blocks are reused."""
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, pending.token_ids.shape[0]).to(torch.bfloat16)
        event = _CopyDone()
        self._req_copy_events[pending.req_id] = event
        tensors = {"hidden_states": states, "token_ids": pending.token_ids}
        self._executor.submit(self._write_tensors, tensors, event, pending.filename, None)

    def _write_tensors(self, tensors: dict[str, torch.Tensor], event: Any, filename: str, lock_fd: int | None) -> None:
        num_bytes = tensors["token_ids"].shape[0] * self._row_bytes
        try:
            event.synchronize()
            states = tensors["hidden_states"].to(torch.bfloat16).contiguous()
            path = Path(filename)
            self._appender(path.parent).append(path.name, memoryview(states.view(torch.int16).numpy()))
        finally:
            with self._freed:
                self._bytes_in_flight -= num_bytes
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
                self._appenders[str(folder)] = ShardAppender(folder, self._row_bytes, self._max_shard_bytes)
            return self._appenders[str(folder)]
