"""vLLM imports this in every worker before it loads a model: corrections of what vLLM does when it captures."""

from typing import Any

import torch
import vllm
from vllm.platforms import current_platform


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


def draft_nothing_while_capturing() -> None:
    """vLLM captures as a method of speculative decoding, whose draft is the sampled token once more.

    Verifying it doubles the tokens of a step and ends in another sampler; it says nothing, so it is not scheduled.
    """
    from vllm.v1.worker.gpu_worker import Worker

    take = Worker.take_draft_token_ids

    def take_real_drafts(self: Any) -> Any:
        speculative = self.speculative_config
        return None if speculative and speculative.method == "extract_hidden_states" else take(self)

    Worker.take_draft_token_ids = take_real_drafts


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


draft_nothing_while_capturing()
keep_padding_out_of_sequences()
if tuple(int(part) for part in vllm.__version__.split(".")[:2]) < (0, 25):
    capture_last_layer()
if current_platform.is_cpu():
    share_blocks_on_cpu()
