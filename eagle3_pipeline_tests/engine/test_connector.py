"""Decisions of the connector and the engine's arguments, without an engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from eagle3_pipeline.engine.connector import ShardConnector
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.vllm_backend import engine_arguments


def _connector(rank: int) -> ShardConnector:
    made = object.__new__(ShardConnector)
    made._is_tp_rank_zero, made._req_copy_events = rank == 0, {}
    made._accumulated_finished_req_ids, made._lock_fds = set(), {}
    made._connector_metadata = None
    return made


@pytest.mark.parametrize("rank", [0, 1])
def test_a_request_without_a_path_is_not_captured_and_is_done(rank: int) -> None:
    """As many reports of a request as the engine waits for: one, of the first rank."""
    connector = _connector(rank)
    connector._submit_async_write(SimpleNamespace(req_id="r", filename="r.safetensors"))
    sent, _ = connector.get_finished({"r"})
    assert sent == ({"r"} if rank == 0 else None)
    assert connector.get_finished_count() == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_copies_reports_a_request(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24's connector reports on every rank, and on those that copy nothing before the copy is done."""
    parent = ShardConnector.__mro__[1]
    monkeypatch.setattr(parent, "get_finished", lambda _self, ids: (ids, None))
    assert _connector(rank).get_finished({"r"}) == ({"r"} if rank == 0 else None, None)


def test_a_cache_of_a_given_size_is_asked_for_on_gpus_only() -> None:
    spec = EngineSpec("model", "id", "bfloat16", False, 64, num_gpus=1, gpu_kvcache_gib=1.5)
    assert engine_arguments(spec)["kv_cache_memory_bytes"] == 1.5 * 2**30
    assert "kv_cache_memory_bytes" not in engine_arguments(replace(spec, gpu_kvcache_gib=None))
    assert "kv_cache_memory_bytes" not in engine_arguments(replace(spec, num_gpus=0))
