"""Tiny random verifiers of many families, with norms and biases that are not neutral."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers as T

from eagle3_pipeline_tests.tiny_model import VOCAB_SIZE as V
from eagle3_pipeline_tests.tiny_model import make_tokenizer

BASE = dict(
    vocab_size=V,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=64,
    max_position_embeddings=1024,
    initializer_range=0.12,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=0,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def b(**kw: Any) -> dict[str, Any]:
    d = dict(BASE)
    d.update(kw)
    return {k: v for k, v in d.items() if v is not ...}


MLA = dict(q_lora_rank=64, kv_lora_rank=512, qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, head_dim=...)
ROPE3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR = dict(
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_conv_kernel_dim=4,
)
HYB = ["linear_attention"] * 3 + ["full_attention"]

F: dict[str, Any] = {
    "qwen3": lambda: T.Qwen3Config(**b(tie_word_embeddings=False)),
    "qwen3_tied": lambda: T.Qwen3Config(**b(tie_word_embeddings=True)),
    "qwen3_moe": lambda: T.Qwen3MoeConfig(**b(tie_word_embeddings=False, **MOE)),
    "gemma3": lambda: T.Gemma3TextConfig(**b(query_pre_attn_scalar=64, sliding_window=32)),
    "gemma2": lambda: T.Gemma2Config(**b(query_pre_attn_scalar=64, sliding_window=32, final_logit_softcapping=30.0)),
    "gemma1": lambda: T.GemmaConfig(**b()),
    "gpt_oss": lambda: T.GptOssConfig(
        **b(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=32,
            tie_word_embeddings=False,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        )
    ),
    "llama_tied_rope3": lambda: T.LlamaConfig(**b(tie_word_embeddings=True, rope_parameters=ROPE3)),
    "llama4_text": lambda: T.Llama4TextConfig(
        **b(
            intermediate_size_mlp=256,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            attention_chunk_size=256,
            tie_word_embeddings=False,
            rope_parameters=ROPE3,
            no_rope_layer_interval=4,
        )
    ),
    "mistral": lambda: T.MistralConfig(**b(tie_word_embeddings=False, sliding_window=64)),
    "phi3": lambda: T.Phi3Config(
        **b(
            tie_word_embeddings=False,
            num_key_value_heads=1,
            head_dim=...,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            original_max_position_embeddings=1024,
        )
    ),
    "phi3_longrope": lambda: T.Phi3Config(
        **b(
            tie_word_embeddings=False,
            head_dim=...,
            original_max_position_embeddings=64,
            max_position_embeddings=1024,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.02 * i for i in range(32)],
                "long_factor": [1.5 + 0.5 * i for i in range(32)],
                "original_max_position_embeddings": 64,
            },
        )
    ),
    "phi4_mini": lambda: T.Phi3Config(
        **b(
            tie_word_embeddings=True,
            head_dim=...,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
            original_max_position_embeddings=1024,
        )
    ),
    "phi": lambda: T.PhiConfig(**b(head_dim=..., num_key_value_heads=2)),
    "granite": lambda: T.GraniteConfig(
        **b(
            tie_word_embeddings=True,
            logits_scaling=8.0,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.015625,
            head_dim=...,
        )
    ),
    "granite_neutral": lambda: T.GraniteConfig(
        **b(
            tie_word_embeddings=True,
            logits_scaling=1.0,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            attention_multiplier=0.0625,
            head_dim=...,
        )
    ),
    "cohere2_neutral": lambda: T.Cohere2Config(**b(logit_scale=1.0, sliding_window=64)),
    "olmo2": lambda: T.Olmo2Config(**b(tie_word_embeddings=False, head_dim=...)),
    "olmo3": lambda: T.Olmo3Config(**b(tie_word_embeddings=False, head_dim=..., sliding_window=64)),
    "glm4_moe": lambda: T.Glm4MoeConfig(
        **b(
            tie_word_embeddings=False,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            num_nextn_predict_layers=0,
            use_qk_norm=True,
        )
    ),
    "deepseek_v3": lambda: T.DeepseekV3Config(
        **b(
            tie_word_embeddings=False,
            num_key_value_heads=2,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.0,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            **MLA,
        )
    ),
    "minimax_m2": lambda: T.MiniMaxM2Config(
        **b(tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2, intermediate_size=64, rotary_dim=32)
    ),
    "qwen3_next": lambda: T.Qwen3NextConfig(
        **b(
            tie_word_embeddings=False,
            layer_types=HYB * 2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=64,
            partial_rotary_factor=0.25,
            **MOE,
            **LINEAR,
        )
    ),
    "qwen3_5_text": lambda: T.Qwen3_5TextConfig(**b(tie_word_embeddings=False, layer_types=HYB * 2, **LINEAR)),
    "qwen3_5_moe_text": lambda: T.Qwen3_5MoeTextConfig(
        **b(tie_word_embeddings=False, layer_types=HYB * 2, shared_expert_intermediate_size=64, **MOE, **LINEAR)
    ),
    "smollm3": lambda: T.SmolLM3Config(**b(tie_word_embeddings=True, head_dim=..., no_rope_layer_interval=4)),
    "minicpm3": lambda: T.MiniCPM3Config(
        **b(
            tie_word_embeddings=True,
            num_key_value_heads=2,
            scale_emb=12,
            dim_model_base=32,
            scale_depth=1.4,
            hidden_size=128,
            **(MLA | dict(kv_lora_rank=64, qk_rope_head_dim=32, qk_nope_head_dim=32)),
        )
    ),
    "lfm2": lambda: T.Lfm2Config(**b(layer_types=["conv", "conv", "full_attention", "conv"] * 2, head_dim=...)),
    "exaone4": lambda: T.Exaone4Config(**b(tie_word_embeddings=True, sliding_window=64, sliding_window_pattern=4)),
    "cohere": lambda: T.CohereConfig(**b(logit_scale=0.0625, head_dim=...)),
    "starcoder2": lambda: T.Starcoder2Config(**b(head_dim=..., tie_word_embeddings=True, sliding_window=None)),
    "stablelm": lambda: T.StableLmConfig(**b(head_dim=..., num_key_value_heads=2, tie_word_embeddings=False)),
    "olmo": lambda: T.OlmoConfig(**b(head_dim=..., tie_word_embeddings=False)),
    "nemotron": lambda: T.NemotronConfig(**b(tie_word_embeddings=False)),
    "nemotron_h": lambda: T.NemotronHConfig(
        vocab_size=V,
        hidden_size=128,
        layers_block_type=["mamba", "attention", "moe", "mamba"] * 2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    ),
    # vLLM's CPU build has no kernel for the experts of the one above.
    "nemotron_h_dense": lambda: T.NemotronHConfig(
        vocab_size=V,
        hidden_size=128,
        intermediate_size=256,
        layers_block_type=["mamba", "attention", "mlp", "mamba", "attention", "mlp", "mamba", "attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=1,
        chunk_size=32,
        initializer_range=0.12,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "falcon_h1": lambda: T.FalconH1Config(
        **b(
            tie_word_embeddings=False,
            lm_head_multiplier=0.25,
            mamba_d_ssm=128,
            mamba_n_heads=4,
            mamba_d_head=32,
            mamba_d_state=32,
            mamba_n_groups=1,
            mamba_chunk_size=32,
        )
    ),
    "mixtral": lambda: T.MixtralConfig(**b(tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2)),
    "phimoe": lambda: T.PhimoeConfig(
        **b(tie_word_embeddings=False, head_dim=..., num_local_experts=4, num_experts_per_tok=2, lm_head_bias=True)
    ),
    "helium": lambda: T.HeliumConfig(**b(tie_word_embeddings=False)),
    "seed_oss": lambda: T.SeedOssConfig(**b(tie_word_embeddings=False)),
    "ernie4_5": lambda: T.Ernie4_5Config(**b(tie_word_embeddings=True)),
    "hunyuan_dense": lambda: T.HunYuanDenseV1Config(**b(tie_word_embeddings=True)),
    "glm4": lambda: T.Glm4Config(**b(tie_word_embeddings=False, partial_rotary_factor=0.5)),
    "nanochat": lambda: T.NanoChatConfig(**b(tie_word_embeddings=False, final_logit_softcapping=15.0, head_dim=...)),
    "mamba2": lambda: T.Mamba2Config(
        vocab_size=V,
        hidden_size=128,
        num_hidden_layers=8,
        num_heads=8,
        head_dim=32,
        state_size=32,
        n_groups=1,
        expand=2,
        chunk_size=32,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
    "apertus": lambda: T.ApertusConfig(**b(tie_word_embeddings=False)),
    "gemma4_text": lambda: T.Gemma4TextConfig(**b(final_logit_softcapping=30.0, sliding_window=32)),
    "qwen2": lambda: T.Qwen2Config(**b(tie_word_embeddings=True, head_dim=...)),
}


def nested(kind: str) -> Any:
    """Config of a multimodal wrapper."""
    if kind == "qwen3_vl":
        text = T.Qwen3VLTextConfig(
            **b(
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e6,
                    "mrope_section": [12, 10, 10],
                    "mrope_interleaved": True,
                }
            )
        )
        return T.Qwen3VLConfig(
            text_config=text.to_dict(),
            vision_config=dict(
                depth=2,
                hidden_size=64,
                intermediate_size=64,
                num_heads=2,
                patch_size=16,
                out_hidden_size=128,
                deepstack_visual_indexes=[0],
                num_position_embeddings=64,
            ),
            tie_word_embeddings=True,
            image_token_id=300,
            video_token_id=301,
            vision_start_token_id=302,
            vision_end_token_id=303,
        )
    if kind == "gemma3_mm":
        text = T.Gemma3TextConfig(**b(query_pre_attn_scalar=64, sliding_window=32))
        return T.Gemma3Config(
            text_config=text.to_dict(),
            vision_config=dict(
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=56,
                patch_size=14,
                vision_use_head=False,
            ),
            mm_tokens_per_image=4,
            image_token_index=300,
            boi_token_index=301,
            eoi_token_index=302,
        )
    if kind == "mistral3":
        text = (
            T.MistralConfig(**b(tie_word_embeddings=False, sliding_window=None))
            if not hasattr(T, "Ministral3Config")
            else T.Ministral3Config(**b(tie_word_embeddings=False, sliding_window=None))
        )
        return T.Mistral3Config(
            text_config=text.to_dict(),
            vision_config=dict(
                model_type="pixtral",
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                head_dim=32,
                image_size=56,
                patch_size=14,
            ),
            image_token_index=300,
        )
    if kind == "mistral3_tied":
        text = T.Ministral3Config(**b(tie_word_embeddings=True, sliding_window=None))
        return T.Mistral3Config(
            text_config=text.to_dict(),
            tie_word_embeddings=True,
            vision_config=dict(
                model_type="pixtral",
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                head_dim=32,
                image_size=56,
                patch_size=14,
            ),
            image_token_index=300,
        )
    if kind == "llama4_mm":
        text = F["llama4_text"]()
        return T.Llama4Config(
            text_config=text.to_dict(),
            vision_config=dict(
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=56,
                patch_size=14,
                vision_output_dim=64,
                projector_input_dim=64,
                projector_output_dim=64,
            ),
            image_token_index=300,
            boi_token_index=301,
            eoi_token_index=302,
        )
    if kind == "qwen3_5":
        text = F["qwen3_5_text"]()
        return T.Qwen3_5Config(
            text_config=text.to_dict(),
            vision_config=dict(
                depth=2,
                hidden_size=64,
                intermediate_size=64,
                num_heads=2,
                patch_size=16,
                out_hidden_size=128,
                num_position_embeddings=64,
            ),
            image_token_id=300,
            video_token_id=301,
            vision_start_token_id=302,
            vision_end_token_id=303,
        )
    if kind == "qwen3_5_moe":
        text = F["qwen3_5_moe_text"]()
        return T.Qwen3_5MoeConfig(
            text_config=text.to_dict(),
            vision_config=dict(
                depth=2,
                hidden_size=64,
                intermediate_size=64,
                num_heads=2,
                patch_size=16,
                out_hidden_size=128,
                num_position_embeddings=64,
            ),
            image_token_id=300,
            video_token_id=301,
            vision_start_token_id=302,
            vision_end_token_id=303,
        )
    raise KeyError(kind)


NESTED = ("qwen3_vl", "gemma3_mm", "mistral3", "mistral3_tied", "llama4_mm", "qwen3_5", "qwen3_5_moe")
KINDS = (*F, *NESTED)


def _adds_one(module: Any) -> bool:
    """Whether a norm multiplies by 1 + weight: with weight 0 it keeps a unit row's size."""
    weight = module.weight
    saved = weight.clone()
    weight.zero_()
    try:
        found = module(torch.ones(1, 1, weight.numel()))
    except Exception:  # a norm with further arguments multiplies by its weight
        found = torch.zeros(1)
    weight.copy_(saved)
    return float(found.float().abs().max()) > 0.5


@torch.no_grad()
def make_family(kind: str, folder: Path) -> Path:
    """Saves a model of this family with a tokenizer, in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = nested(kind) if kind in NESTED else F[kind]()
    auto = T.AutoModelForImageTextToText if kind in NESTED else T.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if "norm" in type(module).__name__.lower() and getattr(module, "weight", None) is not None:
            noise = 0.3 * torch.randn(module.weight.shape, generator=generator)
            module.weight.copy_((0.0 if _adds_one(module) else 1.0) + noise)
            if getattr(module, "bias", None) is not None:
                module.bias.copy_(0.1 * torch.randn(module.bias.shape, generator=generator))
    for name, parameter in model.named_parameters():
        _fill(name, parameter, generator)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    path = folder / "generation_config.json"
    if path.exists():
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 2}))
    return folder


def _fill(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    """Gives values to what is not finite, zero, or a zero row of embeddings."""
    if not torch.isfinite(parameter).all():
        parameter.copy_(
            0.1 * torch.ones(parameter.shape) if parameter.dim() == 1 else _noise(parameter, 0.1, generator)
        )
    if "vis" in name:
        return
    if parameter.abs().sum() == 0 and (parameter.dim() >= 2 or name.endswith("bias")):
        parameter.copy_(_noise(parameter, 0.05, generator))
    if "embed" in name and parameter.dim() == 2:
        zero = parameter.abs().sum(1) == 0
        parameter[zero] = _noise(parameter[zero], 0.1, generator)


def _noise(like: torch.Tensor, size: float, generator: torch.Generator) -> torch.Tensor:
    return size * torch.randn(like.shape, generator=generator)
