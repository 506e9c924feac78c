"""Sizes that follow from a verifier's config: positions, width of its MLP."""

from collections.abc import Mapping
from typing import Any

EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")
_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Types whose factor vLLM does not multiply positions by: their limit is written as it is, or follows below.
_NOT_MULTIPLIED = ("default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope")
_YARN = ("yarn", "deepseek_yarn")
_TOP_K_KEYS = (
    "num_experts_per_tok",
    "experts_per_token",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)


# vLLM tunes the temperature of Llama 4's attention from this length of the engine on, unless the model's files say so.
_LLAMA4_TUNED_BEYOND = 32768


def length_switches(config: Mapping[str, Any]) -> dict[str, int]:
    """What an engine computes otherwise once its `max_model_len` is larger than this, whatever a sequence's length.

    Long RoPE: vLLM takes the long factors for all sequences (`Phi3LongRoPEScaledRotaryEmbedding`), Transformers for
    those that are longer. Llama 4: vLLM's `Llama4ForCausalLM`.
    """
    found = {}
    for rope in rope_variants(config):
        original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
        if (rope.get("rope_type") or rope.get("type")) in ("longrope", "su") and isinstance(original, int):
            found["long factors of the rotary embedding"] = original
    if str(config.get("model_type", "")).startswith("llama4"):
        found["temperature tuning of attention"] = _LLAMA4_TUNED_BEYOND
    return found


# Of layers by their kind, and of sizes that only layers with a recurrent state have.
_RECURRENT_KINDS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "kda")
_RECURRENT_SIZES = (
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_num_heads",
    "linear_num_value_heads",
    "linear_attn_config",
    "conv_L_cache",
    "lru_width",
)


def has_recurrent_layers(config: Mapping[str, Any]) -> bool:
    """Whether layers carry a state from token to token (Mamba, gated delta nets, short convolutions)."""
    kinds = [kind for key in ("layer_types", "layers_block_type") for kind in config.get(key) or ()]
    return any(kind in _RECURRENT_KINDS for kind in kinds) or any(config.get(key) for key in _RECURRENT_SIZES)


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether tokens are sent to experts."""
    return any(config.get(key) for key in EXPERT_KEYS)


def max_positions(config: Mapping[str, Any]) -> int:
    """Longest sequence in tokens that vLLM serves; 0: the config sets no limit.

    By `_get_and_verify_max_len` of vLLM: the smallest limit that the config names, times the factor of linear and
    dynamic scaling. With YaRN the factor multiplies `original_max_position_embeddings`, as Transformers'
    `_compute_yarn_parameters` does; where the config's own limit is not scaled yet, vLLM 0.32 has to be told.
    """
    if config.get("model_max_length"):
        return int(config["model_max_length"])
    limits = [int(config[key]) for key in _POSITION_KEYS if isinstance(config.get(key), int | float) and config[key]]
    if not limits:
        return 0
    limit = float(min(limits))
    scaled = limit
    for rope in rope_variants(config):
        kind, factor = rope.get("rope_type") or rope.get("type"), rope.get("factor") or 1.0
        original = rope.get("original_max_position_embeddings")
        if kind in _YARN and original:
            scaled = max(scaled, factor * original)
        elif kind not in _NOT_MULTIPLIED and "gemma3" not in str(config.get("model_type", "")):
            scaled = max(scaled, factor * limit)
    return int(scaled)


def rope_variants(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Parameters of the rotary embedding; one set of each kind of layer where a config names several."""
    for key in ("rope_parameters", "rope_scaling"):
        found = config.get(key)
        if isinstance(found, Mapping) and found:
            nested = [one for one in found.values() if isinstance(one, Mapping)]
            return nested or [found]
    return []


def is_yarn(config: Mapping[str, Any]) -> bool:
    """Whether positions are scaled by YaRN."""
    return any((rope.get("rope_type") or rope.get("type")) in _YARN for rope in rope_variants(config))


def mlp_width(config: Mapping[str, Any]) -> int | None:
    """Width of the MLP that a dense layer of this verifier has, or would have; `None`: the config does not say.

    With experts and no dense layers `intermediate_size` may be an expert's: one that is no wider than the hidden size
    is taken for that, and the width is what a token goes through, top-k experts and the shared ones.
    """
    size = config.get("intermediate_size")
    dense = size if isinstance(size, int) and not isinstance(size, bool) else None
    if not has_experts(config) or (dense and dense > int(config.get("hidden_size") or 0)):
        return dense
    return _active_width(config, dense) or dense


def _active_width(config: Mapping[str, Any], dense: int | None) -> int | None:
    expert = config.get("moe_intermediate_size") or dense
    top_k = next((config[key] for key in _TOP_K_KEYS if config.get(key)), None)
    if not isinstance(expert, int) or not isinstance(top_k, int):
        return None
    shared = config.get("shared_expert_intermediate_size") or config.get("moe_shared_expert_intermediate_size")
    num_shared = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
    return top_k * expert + (shared if isinstance(shared, int) else num_shared * expert)
