"""Geometry of the draft: from `draft:` in the pipeline file, and from the verifier where that says null."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, LlamaConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eagle3_pipeline.config import DraftSpec
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.verifiers.ask import EPS_NAMES, norm_eps
from eagle3_pipeline.verifiers.sizes import has_experts, is_yarn, max_positions, mlp_width


def read_verifier_config(path: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The config of the verifier's language model; a multimodal verifier's nested `text_config` is resolved.

    Raises:
        TrainingError: it cannot be read.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise TrainingError(f"the verifier's config in {path} cannot be read: {error}") from error
    architectures = config.architectures
    config = getattr(config, "text_config", None) or config
    config.architectures = architectures
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
    _check_positive(draft)
    heads = draft.num_attention_heads or getattr(verifier, "num_attention_heads", None)
    if not heads:
        raise TrainingError("draft.num_attention_heads must be given: the verifier's config has no attention heads")
    kv_heads = draft.num_key_value_heads or getattr(verifier, "num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise TrainingError(
            f"draft.num_attention_heads {heads} is not a multiple of draft.num_key_value_heads {kv_heads}"
        )
    head_dim = draft.head_dim or _derived_head_dim(verifier, heads)
    if head_dim % 2:
        raise TrainingError(f"draft.head_dim {head_dim} must be even (rotary embedding turns pairs)")
    layers = LlamaConfig(
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
    _check_rotation(layers)
    return layers


def _check_positive(draft: DraftSpec) -> None:
    for name, value in draft.model_dump().items():
        if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
            raise TrainingError(f"draft.{name} {value} must be above 0")


def _check_rotation(layers: LlamaConfig) -> None:
    """The verifier's scaling fits heads of the draft's size: its factors may be given for each pair of a head."""
    kind = layers.rope_parameters["rope_type"]
    if kind == "default":
        return
    try:
        num_pairs = len(ROPE_INIT_FUNCTIONS[kind](layers, "cpu")[0])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise TrainingError(
            f"draft.rope_theta must be given: the verifier's rotary embedding of type {kind} does not fit the draft: "
            f"{type(error).__name__}: {error}"
        ) from error
    if num_pairs != layers.head_dim // 2:
        raise TrainingError(
            f"draft.rope_theta or another draft.head_dim must be given: the verifier's rotary embedding of type {kind} "
            f"turns {num_pairs} pairs of a head, one of the draft has {layers.head_dim // 2}"
        )


def expected_tensors(layers: LlamaConfig, draft_vocab_size: int, num_aux: int, norm_before_fc: bool) -> dict[str, Any]:
    """Type and shape of every tensor that vLLM needs, written down independently of the model class.

    vLLM does not report a missing tensor: a norm would stay at ones, `fc` uninitialised, `d2t` the identity.
    """
    hidden, inner = layers.hidden_size, layers.intermediate_size
    query, key = layers.num_attention_heads * layers.head_dim, layers.num_key_value_heads * layers.head_dim
    shapes: dict[str, list[int]] = {
        "embed_tokens.weight": [layers.vocab_size, hidden],
        "fc.weight": [hidden, num_aux * hidden],
        "layers.0.hidden_norm.weight": [hidden],
        "layers.0.input_layernorm.weight": [hidden],
        "layers.0.self_attn.q_proj.weight": [query, 2 * hidden],
        "layers.0.self_attn.k_proj.weight": [key, 2 * hidden],
        "layers.0.self_attn.v_proj.weight": [key, 2 * hidden],
        "layers.0.self_attn.o_proj.weight": [hidden, query],
        "layers.0.post_attention_layernorm.weight": [hidden],
        "layers.0.mlp.gate_proj.weight": [inner, hidden],
        "layers.0.mlp.up_proj.weight": [inner, hidden],
        "layers.0.mlp.down_proj.weight": [hidden, inner],
        "norm.weight": [hidden],
        "lm_head.weight": [draft_vocab_size, hidden],
    }
    if norm_before_fc:
        shapes["input_norm.weight"] = [num_aux * hidden]
    expected: dict[str, Any] = {name: ("BF16", shape) for name, shape in shapes.items()}
    if draft_vocab_size != layers.vocab_size:
        expected |= {"d2t": ("I64", [draft_vocab_size]), "t2d": ("BOOL", [layers.vocab_size])}
    return expected


def verifier_norm_eps(verifier: PretrainedConfig) -> float:
    """Epsilon of the verifier's norms, which is the draft's where `draft.rms_norm_eps` is null."""
    eps = norm_eps({name: getattr(verifier, name, None) for name in EPS_NAMES})
    if eps is None:
        raise TrainingError("draft.rms_norm_eps must be given: the verifier's config has no epsilon of a norm")
    return eps


def _derived_head_dim(verifier: PretrainedConfig, heads: int) -> int:
    if getattr(verifier, "kv_lora_rank", None):
        # Multi-head latent attention: `head_dim` is the rotary part of a head there.
        raise TrainingError(
            "draft.head_dim must be given: the verifier uses multi-head latent attention, which has no head size that "
            "a draft could take over (128 is usual)"
        )
    # Configs whose layers differ give no attribute, but their value for most layers.
    if head_dim := verifier.to_dict().get("head_dim"):
        return int(head_dim)
    if verifier.hidden_size % heads:
        raise TrainingError(
            f"draft.head_dim must be given: the hidden size {verifier.hidden_size} is not a multiple of {heads} heads"
        )
    return verifier.hidden_size // heads


def _derived_intermediate_size(verifier: PretrainedConfig) -> int:
    found = {"intermediate_size": getattr(verifier, "intermediate_size", None), "hidden_size": verifier.hidden_size}
    size, hidden = mlp_width({**verifier.to_dict(), **found}), verifier.hidden_size
    if not isinstance(size, int):
        raise TrainingError(
            f"draft.intermediate_size must be given: the verifier's config says {found['intermediate_size']!r}"
        )
    if size < hidden and has_experts(verifier.to_dict()):
        raise TrainingError(
            f"draft.intermediate_size must be given: the verifier's config says {found['intermediate_size']}, the size "
            f"of an expert, and a token's experts together are {size} wide, less than the hidden size {hidden}"
        )
    return size


def _max_position_embeddings(draft: DraftSpec, verifier: PretrainedConfig) -> int:
    own, wanted = getattr(verifier, "max_position_embeddings", None), draft.max_position_embeddings
    if own is None and wanted is None:
        raise TrainingError(
            "draft.max_position_embeddings must be given: the verifier's config has no max_position_embeddings"
        )
    # What YaRN scales to, where the verifier's config names the positions before it.
    limit = max(own, max_positions(verifier.to_dict())) if own and is_yarn(verifier.to_dict()) else own
    if wanted and limit and wanted > limit:
        raise TrainingError(f"draft.max_position_embeddings {wanted} exceeds the verifier's {limit}")
    return int(wanted or own or 0)


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
