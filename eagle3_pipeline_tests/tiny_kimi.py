"""A tiny random model of Kimi-K2.5's architecture: MLA, experts, a vision tower, several shards, its own code."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_pipeline_tests.kimi_files.tokenization_kimi import NUM_BYTES

# In the order of the real ids.
SPECIAL_TOKENS = [
    "[BOS]",
    "[EOS]",
    "<|im_end|>",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    "[PAD]",
]
TOKEN_IDS = {token: NUM_BYTES + i for i, token in enumerate(SPECIAL_TOKENS)}
VOCAB_SIZE = 320
HIDDEN = 128
NUM_LAYERS = 8
HEAD_SHARD = "model-00004-of-00005.safetensors"
HEAD_TENSORS = (
    "language_model.lm_head.weight",
    "language_model.model.embed_tokens.weight",
    "language_model.model.norm.weight",
)
_HEADS, _EXPERTS, _INNER, _EXPERT_INNER, _Q_RANK = 4, 8, 256, 128, 64
# The sizes of the real model: GPU kernels of latent attention take no others.
_KV_RANK, _NOPE, _ROPE, _VALUE = 512, 128, 64, 128
_VISION, _VISION_INNER, _PATCH, _GRID = 32, 64, 14, 4
_FILES = Path(__file__).parent / "kimi_files"


def make_tiny_kimi(folder: Path, seed: int = 0, dtype: str = "float32", steady: bool = False) -> Path:
    """Saves the model with its tokenizer; weights large enough that every layer changes the residual visibly.

    Two tensor-parallel ranks can share it, and vLLM from 0.24 on reads it.

    Args:
        folder: made if it does not exist.
        seed: of the weights.
        dtype: of the weights.
        steady: every token goes to the same experts of a layer. In bf16 rounding changes the experts of many tokens
            otherwise, and states are no longer comparable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config(dtype))
    _write_weights(folder, seed, dtype, steady)
    _write_tokenizer(folder)
    return folder


def config(dtype: str = "float32") -> dict[str, Any]:
    """The values of config.json. The vision tower's sizes have one name each in vLLM 0.24 and in Transformers."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_kimi.TinyKimiConfig"},
        "model_type": "kimi_k25",
        "dtype": dtype,
        "bos_token_id": TOKEN_IDS["[BOS]"],
        "eos_token_id": TOKEN_IDS["[EOS]"],
        "pad_token_id": TOKEN_IDS["[PAD]"],
        "image_token_id": TOKEN_IDS["<|media_pad|>"],
        "media_placeholder_token_id": TOKEN_IDS["<|media_pad|>"],
        "tie_word_embeddings": False,
        "projection_hidden_size": _VISION,
        "text_config": {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "dtype": dtype,
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": _INNER,
            "moe_intermediate_size": _EXPERT_INNER,
            "num_hidden_layers": NUM_LAYERS,
            "num_nextn_predict_layers": 0,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _HEADS,
            "q_lora_rank": _Q_RANK,
            "kv_lora_rank": _KV_RANK,
            "qk_nope_head_dim": _NOPE,
            "qk_rope_head_dim": _ROPE,
            "v_head_dim": _VALUE,
            "n_routed_experts": _EXPERTS,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.827,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "bos_token_id": TOKEN_IDS["[BOS]"],
            "eos_token_id": TOKEN_IDS["[EOS]"],
            "pad_token_id": TOKEN_IDS["[PAD]"],
            "tie_word_embeddings": False,
        },
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": _VISION,
            "intermediate_size": _VISION_INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "patch_size": _PATCH,
            "merge_kernel_size": [2, 2],
            "pos_emb_height": _GRID,
            "pos_emb_width": _GRID,
            "pos_emb_time": 4,
            "init_pos_emb_height": _GRID,
            "init_pos_emb_width": _GRID,
            "init_pos_emb_time": 4,
            "mm_hidden_size": HIDDEN,
        },
    }


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def _layer(i: int) -> Shapes:
    prefix = f"language_model.model.layers.{i}"
    attention = f"{prefix}.self_attn"
    yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
    yield f"{attention}.q_a_proj.weight", (_Q_RANK, HIDDEN)
    yield f"{attention}.q_a_layernorm.weight", (_Q_RANK,)
    yield f"{attention}.q_b_proj.weight", (_HEADS * (_NOPE + _ROPE), _Q_RANK)
    yield f"{attention}.kv_a_proj_with_mqa.weight", (_KV_RANK + _ROPE, HIDDEN)
    yield f"{attention}.kv_a_layernorm.weight", (_KV_RANK,)
    yield f"{attention}.kv_b_proj.weight", (_HEADS * (_NOPE + _VALUE), _KV_RANK)
    yield f"{attention}.o_proj.weight", (HIDDEN, _HEADS * _VALUE)
    yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
    if i == 0:
        yield from _mlp(f"{prefix}.mlp", _INNER)
        return
    yield f"{prefix}.mlp.gate.weight", (_EXPERTS, HIDDEN)
    yield f"{prefix}.mlp.gate.e_score_correction_bias", (_EXPERTS,)
    yield from _mlp(f"{prefix}.mlp.shared_experts", _EXPERT_INNER)
    for expert in range(_EXPERTS):
        yield from _mlp(f"{prefix}.mlp.experts.{expert}", _EXPERT_INNER)


def _mlp(prefix: str, inner: int) -> Shapes:
    yield f"{prefix}.gate_proj.weight", (inner, HIDDEN)
    yield f"{prefix}.up_proj.weight", (inner, HIDDEN)
    yield f"{prefix}.down_proj.weight", (HIDDEN, inner)


def _head() -> Shapes:
    yield HEAD_TENSORS[0], (VOCAB_SIZE, HIDDEN)
    yield HEAD_TENSORS[1], (VOCAB_SIZE, HIDDEN)
    yield HEAD_TENSORS[2], (HIDDEN,)


def _vision() -> Shapes:
    merged, block = 4 * _VISION, "vision_tower.encoder.blocks.0"
    yield "vision_tower.patch_embed.proj.weight", (_VISION, 3, _PATCH, _PATCH)
    yield "vision_tower.patch_embed.proj.bias", (_VISION,)
    yield "vision_tower.patch_embed.pos_emb.weight", (_GRID, _GRID, _VISION)
    for name, out, inner in (
        (f"{block}.wqkv", 3 * _VISION, _VISION),
        (f"{block}.wo", _VISION, _VISION),
        (f"{block}.mlp.fc0", _VISION_INNER, _VISION),
        (f"{block}.mlp.fc1", _VISION, _VISION_INNER),
        ("mm_projector.proj.0", merged, merged),
        ("mm_projector.proj.2", HIDDEN, merged),
    ):
        yield f"{name}.weight", (out, inner)
        yield f"{name}.bias", (out,)
    for norm in (f"{block}.norm0", f"{block}.norm1", "vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"):
        yield f"{norm}.weight", (_VISION,)
        yield f"{norm}.bias", (_VISION,)


def _write_weights(folder: Path, seed: int, dtype: str, steady: bool) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    layers = [list(_layer(i)) for i in range(NUM_LAYERS)]
    # As in the real model, the last shard but one holds what surrounds the layers.
    shards = [layers[0] + layers[1], sum(layers[2:5], []), sum(layers[5:], []), list(_head()), list(_vision())]
    weight_map: dict[str, str] = {}
    total = 0
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _draw(name, shape, generator, steady).to(getattr(torch, dtype)) for name, shape in shapes}
        if HEAD_TENSORS[0] in tensors:
            # No text holds an image's place; Transformers replaces the token on its way in.
            tensors[HEAD_TENSORS[0]][TOKEN_IDS["<|media_pad|>"]] = 0
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def _draw(name: str, shape: tuple[int, ...], generator: Any, steady: bool) -> Any:
    import torch

    if "norm" in name:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    if steady and name.endswith("e_score_correction_bias"):
        # The scores that it is added to lie between 0 and 1.
        return torch.randperm(shape[0], generator=generator).float()
    if name.endswith("bias"):
        return 0.05 * torch.randn(shape, generator=generator)
    # Keeps the size of what goes through; a position's embedding is no larger than what a layer adds to it.
    return torch.randn(shape, generator=generator) / math.sqrt(math.prod(shape[1:]))


def _write_tokenizer(folder: Path) -> None:
    for name in ("tokenization_kimi.py", "configuration_kimi.py", "chat_template.jinja"):
        shutil.copyfile(_FILES / name, folder / name)
    added = {
        str(token_id): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": token not in ("<think>", "</think>"),
        }
        for token, token_id in TOKEN_IDS.items()
    }
    tokenizer = {
        "tokenizer_class": "TinyKimiTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TinyKimiTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", tokenizer)
    (folder / "bytes.txt").write_text("bytes\n")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
