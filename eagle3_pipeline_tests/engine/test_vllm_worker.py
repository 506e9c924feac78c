"""Corrections of vLLM that workers import, on vLLM's own classes."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(("layer_ids", "num_added"), [((2, 4, 5, 8), 1), ((2, 4, 5), 0)])
def test_the_last_layer_gets_a_successor_whose_input_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, layer_ids: tuple[int, ...], num_added: int
) -> None:
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

    from eagle3_pipeline.engine.vllm_worker import capture_last_layer

    original = DeepseekV2ForCausalLM.set_aux_hidden_state_layers
    monkeypatch.setattr(DeepseekV2ForCausalLM, "set_aux_hidden_state_layers", original)
    capture_last_layer()
    verifier = DeepseekV2ForCausalLM.__new__(DeepseekV2ForCausalLM)
    torch.nn.Module.__init__(verifier)
    verifier.model = torch.nn.Module()
    verifier.model.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(8))
    verifier.model.end_layer = 8
    verifier.set_aux_hidden_state_layers(layer_ids)
    assert verifier.model.aux_hidden_state_layers == layer_ids
    assert len(verifier.model.layers) == verifier.model.end_layer == 8 + num_added
    if num_added:
        states = torch.ones(3, 2), torch.full((3, 2), 5.0)
        assert verifier.model.layers[8](torch.arange(3), *states, None) == states


@pytest.mark.parametrize(("method", "num_drafted"), [("extract_hidden_states", 0), ("eagle3", 1)])
def test_a_capturing_engine_runs_as_one_without_drafts(
    monkeypatch: pytest.MonkeyPatch, method: str, num_drafted: int
) -> None:
    """With drafts, vLLM would record graphs for steps of two tokens a sequence, and wait for each step's tokens."""
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionMetadataBuilder
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from eagle3_pipeline.engine.vllm_worker import run_as_if_nothing_were_drafted

    def as_vllm(self: Any) -> None:
        self.speculative_config = SimpleNamespace(method=method)
        self.num_spec_tokens = self.prev_num_spec_tokens = 1
        self.use_async_spec_decode, self.valid_sampled_token_count_event = True, object()
        self.uniform_decode_query_len = 2
        self.cudagraph_dispatcher = SimpleNamespace(uniform_decode_query_len=2)

    monkeypatch.setattr(GPUModelRunner, "__init__", as_vllm)
    run_as_if_nothing_were_drafted()
    runner = GPUModelRunner()  # type: ignore[call-arg]
    assert (runner.num_spec_tokens, runner.prev_num_spec_tokens) == (num_drafted, num_drafted)
    assert runner.uniform_decode_query_len == runner.cudagraph_dispatcher.uniform_decode_query_len == 1 + num_drafted
    assert runner.use_async_spec_decode == bool(num_drafted)
    assert (runner.valid_sampled_token_count_event is None) == (not num_drafted)
    spec = SimpleNamespace()
    assert CacheOnlyAttentionMetadataBuilder.get_cudagraph_support(spec, spec) is AttentionCGSupport.ALWAYS


def test_rows_that_pad_a_step_overwrite_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.24 writes them to slot -1, the last one of the last block."""
    from vllm.model_executor.models import extract_hidden_states

    importlib.import_module("eagle3_pipeline.engine.vllm_worker")
    written: list[list[int]] = []
    monkeypatch.setattr(
        extract_hidden_states, "basic_cache", lambda _states, _cache, slots: written.append(slots.tolist())
    )
    impl = extract_hidden_states.CacheOnlyAttentionImpl(3, 8, "auto", torch.bfloat16)
    cache, slots = torch.zeros(4, 3, 16, 8, dtype=torch.bfloat16), torch.tensor([17, 33, -1, -1])
    impl.do_kv_cache_update(None, torch.ones(4, 3, 8, dtype=torch.bfloat16), cache, slots)
    assert written == [[17, 33, 0, 0]] and slots.tolist() == [17, 33, -1, -1]


def test_a_draft_shares_the_blocks_of_latent_attention_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
    from vllm.v1.worker.utils import select_common_block_size

    name = "get_supported_kernel_block_sizes"
    monkeypatch.setattr(CPUAttentionBackend, name, CPUAttentionBackend.__dict__[name])
    from eagle3_pipeline.engine.vllm_worker import share_blocks_on_cpu

    share_blocks_on_cpu()
    assert select_common_block_size(16, [CPUMLABackend, CPUAttentionBackend]) == 16
    assert select_common_block_size(128, [CPUAttentionBackend]) == 128, "other verifiers keep their blocks"
