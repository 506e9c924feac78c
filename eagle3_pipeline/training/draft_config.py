"""Geometry of the draft: from `draft:` in the pipeline file, and from the verifier where that says null."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaConfig, PretrainedConfig

from eagle3_pipeline.config import DraftSpec
from eagle3_pipeline.errors import TrainingError

# A verifier with one of these at another value than the neutral one changes its logits after the output layer, which
# the training targets do not.
_LOGIT_SCALINGS: dict[str, Any] = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0}


def read_verifier_config(path: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The config of the verifier's language model; a multimodal verifier's nested `text_config` is resolved.

    Raises:
        TrainingError: it cannot be read, or the verifier's logits are scaled in a way that training does not model.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TrainingError(f"the verifier's config in {path} cannot be read: {error}") from error
    architectures = config.architectures
    config = getattr(config, "text_config", None) or config
    config.architectures = architectures
    for name, neutral in _LOGIT_SCALINGS.items():
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            raise TrainingError(f"{path}: verifiers with {name} (here {value}) are not supported")
    return config


def check_aux_layers(aux_layer_ids: tuple[int, ...], verifier: PretrainedConfig) -> None:
    """Raises TrainingError unless the ids are distinct, ascending, and inputs of layers that exist."""
    num_layers = verifier.num_hidden_layers
    ascending = list(aux_layer_ids) == sorted(set(aux_layer_ids))
    if not aux_layer_ids or not ascending or aux_layer_ids[0] < 1 or aux_layer_ids[-1] >= num_layers:
        raise TrainingError(
            f"aux layer ids {list(aux_layer_ids)} must ascend within 1..{num_layers - 1} for a verifier of "
            f"{num_layers} layers"
        )


def build_layer_config(draft: DraftSpec, verifier: PretrainedConfig) -> LlamaConfig:
    """The config of the draft's decoder layer.

    The hidden size is always the verifier's: the draft reads the verifier's embeddings and states.

    Raises:
        TrainingError: names the `draft.` key that must be given or changed.
    """
    heads = draft.num_attention_heads or verifier.num_attention_heads
    kv_heads = draft.num_key_value_heads or getattr(verifier, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise TrainingError(
            f"draft.num_attention_heads {heads} is not a multiple of draft.num_key_value_heads {kv_heads}"
        )
    head_dim = draft.head_dim or _derived_head_dim(verifier, heads)
    if head_dim % 2:
        raise TrainingError(f"draft.head_dim {head_dim} must be even (rotary embedding turns pairs)")
    return LlamaConfig(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=draft.intermediate_size or _derived_intermediate_size(verifier),
        num_hidden_layers=draft.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        hidden_act="silu",
        max_position_embeddings=_max_position_embeddings(draft, verifier),
        rms_norm_eps=draft.rms_norm_eps or verifier_norm_eps(verifier),
        rope_parameters=_rope_parameters(draft, verifier),
        attention_bias=False,
        mlp_bias=False,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        # vLLM and speculators both read the window only for layers named `sliding_attention`.
        sliding_window=draft.sliding_window,
        layer_types=["sliding_attention" if draft.sliding_window else "full_attention"] * draft.num_hidden_layers,
    )


def verifier_norm_eps(verifier: PretrainedConfig) -> float:
    """Epsilon of the verifier's RMS norms."""
    eps = getattr(verifier, "rms_norm_eps", None)
    if eps is None:
        raise TrainingError("the verifier's config has no rms_norm_eps: only verifiers with RMS norms are supported")
    return float(eps)


def _derived_head_dim(verifier: PretrainedConfig, heads: int) -> int:
    if getattr(verifier, "kv_lora_rank", None):
        # Multi-head latent attention: `head_dim` is the rotary part of a head there.
        raise TrainingError(
            "draft.head_dim must be given: the verifier uses multi-head latent attention, which has no head size that "
            "a draft could take over (128 is usual)"
        )
    if head_dim := getattr(verifier, "head_dim", None):
        return int(head_dim)
    if verifier.hidden_size % heads:
        raise TrainingError(
            f"draft.head_dim must be given: the hidden size {verifier.hidden_size} is not a multiple of {heads} heads"
        )
    return verifier.hidden_size // heads


def _derived_intermediate_size(verifier: PretrainedConfig) -> int:
    size = getattr(verifier, "intermediate_size", None)
    if not isinstance(size, int):
        raise TrainingError(f"draft.intermediate_size must be given: the verifier's config says {size!r}")
    return size


def _max_position_embeddings(draft: DraftSpec, verifier: PretrainedConfig) -> int:
    limit = getattr(verifier, "max_position_embeddings", None)
    if limit is None:
        raise TrainingError("the verifier's config has no max_position_embeddings")
    if (draft.max_position_embeddings or 0) > limit:
        raise TrainingError(
            f"draft.max_position_embeddings {draft.max_position_embeddings} exceeds the verifier's {limit}"
        )
    return draft.max_position_embeddings or limit


def _rope_parameters(draft: DraftSpec, verifier: PretrainedConfig) -> dict[str, Any]:
    if draft.rope_theta is not None:
        return {"rope_type": "default", "rope_theta": draft.rope_theta}
    parameters = dict(getattr(verifier, "rope_parameters", None) or {})
    # Verifiers with two kinds of layers name each kind's parameters.
    parameters = dict(parameters.get("full_attention", parameters))
    if "rope_theta" not in parameters:
        raise TrainingError("draft.rope_theta must be given: the verifier's config has no rope_theta")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or "mrope_section" in parameters:
        raise TrainingError(
            "draft.rope_theta must be given: the verifier rotates a part of a head or several axes, which the draft "
            "does not"
        )
    parameters.pop("partial_rotary_factor", None)
    return parameters
