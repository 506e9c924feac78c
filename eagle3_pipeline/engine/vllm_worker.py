"""vLLM imports this in every worker before it loads a model: corrections of what vLLM does when it captures.

`corrections` says which of them apply to which model.
"""

from typing import Any

import torch

from eagle3_pipeline.engine.corrections import LAST_LAYER, SHARED_BLOCKS, UNDRAFTED, applied


class WorkerExtension:
    """Names this module in the engine's arguments; it adds nothing to the worker."""


class _PassOn(torch.nn.Module):
    """A layer that does nothing: its input is the output of the last one."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor, *_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return hidden_states, residual


def capture_last_layer() -> None:
    """DeepSeek's models (Kimi-K2.5's language model is one) collect the inputs of layers, and nothing behind the last.

    vLLM 0.25 does. With 0.24 the first request of a capturing engine dies for the missing state.
    """
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2ForCausalLM

    set_layers = DeepseekV2ForCausalLM.set_aux_hidden_state_layers

    def set_layers_and_last(self: Any, layers: tuple[int, ...]) -> None:
        set_layers(self, layers)
        if len(self.model.layers) in layers:
            self.model.layers.append(_PassOn())
            self.model.end_layer += 1

    DeepseekV2ForCausalLM.set_aux_hidden_state_layers = set_layers_and_last


def run_as_if_nothing_were_drafted() -> None:
    """vLLM captures as a method of speculative decoding, whose draft is the sampled token once more.

    Verifying it doubles the tokens of a step and says nothing. So the engine works as one without drafts: a step that
    only decodes has one token of a sequence, CUDA graphs of whole steps are recorded for such steps, and the next one
    takes sampled tokens from the device. States go to their cache behind a step, outside of its graph.
    """
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionMetadataBuilder
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.spec_decode.extract_hidden_states import ExtractHiddenStatesProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    CacheOnlyAttentionMetadataBuilder._cudagraph_support = AttentionCGSupport.ALWAYS
    # Which of the drafted tokens are valid takes a call of Python a sequence.
    ExtractHiddenStatesProposer.prepare_next_token_ids_padded = lambda _self, sampled, *_: (sampled[:, 0],) * 2
    make = GPUModelRunner.__init__

    def make_without_drafts(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if self.speculative_config and self.speculative_config.method == "extract_hidden_states":
            self.num_spec_tokens = self.prev_num_spec_tokens = 0
            self.use_async_spec_decode, self.valid_sampled_token_count_event = False, None
            self.uniform_decode_query_len = self.cudagraph_dispatcher.uniform_decode_query_len = 1

    GPUModelRunner.__init__ = make_without_drafts


def keep_padding_out_of_sequences() -> None:
    """Rows that pad a step to the size of a CUDA graph have the slot -1, and no place of their own.

    vLLM 0.24 takes it for the last slot of the last block, and so overwrites a state of the sequence that has it. As in
    later versions they go to block 0, which no sequence has.
    """
    from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionImpl

    update = CacheOnlyAttentionImpl.do_kv_cache_update

    def update_sequences(self: Any, layer: Any, to_cache: Any, kv_cache: Any, slot_mapping: torch.Tensor) -> None:
        update(self, layer, to_cache, kv_cache, slot_mapping.clamp(min=0))

    CacheOnlyAttentionImpl.do_kv_cache_update = update_sequences


def share_blocks_on_cpu() -> None:
    """Latent attention on CPU has blocks of 16 tokens, and a draft's attention must share them.

    Its kernel can; the backend asks for 32 in vLLM 0.32 because that is faster.
    """
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_args: [MultipleOf(16)])


keep_padding_out_of_sequences()
for _name, _correct in (
    (UNDRAFTED, run_as_if_nothing_were_drafted),
    (LAST_LAYER, capture_last_layer),
    (SHARED_BLOCKS, share_blocks_on_cpu),
):
    if _name in applied():
        _correct()
