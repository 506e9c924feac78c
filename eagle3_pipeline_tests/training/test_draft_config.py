"""Geometry: what is taken from the verifier, what must be given, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig, Qwen3Config

from eagle3_pipeline.config import DraftSpec
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.draft_config import build_layer_config, check_aux_layers, read_verifier_config

# The shape of Kimi-K2.5's language model.
MLA = DeepseekV3Config(
    vocab_size=163840,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=64,
    num_key_value_heads=64,
    max_position_embeddings=262144,
    rms_norm_eps=1e-5,
)


def test_everything_null_follows_the_verifier() -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    verifier = LlamaConfig(
        hidden_size=96,
        intermediate_size=200,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        max_position_embeddings=131072,
        rms_norm_eps=3e-5,
        rope_parameters=scaling,
    )
    layers = build_layer_config(DraftSpec(), verifier)
    assert (layers.hidden_size, layers.intermediate_size, layers.num_hidden_layers) == (96, 200, 1)
    assert (layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim) == (6, 2, 24)
    assert (layers.max_position_embeddings, layers.rms_norm_eps) == (131072, 3e-5)
    assert {k: layers.rope_parameters[k] for k in scaling} == scaling
    assert layers.layer_types == ["full_attention"]
    assert layers.sliding_window is None


def test_own_rope_theta_drops_the_scaling() -> None:
    verifier = LlamaConfig(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0})
    layers = build_layer_config(DraftSpec(rope_theta=1e6), verifier)
    assert layers.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_sliding_window_is_named_where_vllm_reads_it() -> None:
    layers = build_layer_config(DraftSpec(sliding_window=2048), LlamaConfig())
    assert (layers.layer_types, layers.sliding_window) == (["sliding_attention"], 2048)


def test_latent_attention_needs_a_head_size() -> None:
    with pytest.raises(TrainingError, match=r"draft.head_dim must be given: .*multi-head latent attention"):
        build_layer_config(DraftSpec(rope_theta=1e6), MLA)
    layers = build_layer_config(DraftSpec(head_dim=128, rope_theta=1e6), MLA)
    assert (layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim) == (64, 64, 128)
    assert (layers.hidden_size, layers.intermediate_size) == (7168, 18432)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 is not a multiple of .* 4"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "4096 is not a multiple of 7 heads"),
        ({"head_dim": 33}, "draft.head_dim 33 must be even"),
        ({"max_position_embeddings": 4096}, "draft.max_position_embeddings 4096 exceeds the verifier's 2048"),
    ],
)
def test_impossible_geometry(draft: dict[str, Any], message: str) -> None:
    verifier = LlamaConfig(head_dim=None)
    verifier.head_dim = None
    with pytest.raises(TrainingError, match=message):
        build_layer_config(DraftSpec(**draft), verifier)


def test_partial_rotation_needs_a_theta() -> None:
    verifier = Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    with pytest.raises(TrainingError, match="draft.rope_theta must be given"):
        build_layer_config(DraftSpec(), verifier)


@pytest.mark.parametrize("ids", [(), (2, 1, 3), (1, 1, 2), (0, 1, 2), (1, 2, 4)])
def test_aux_layers_out_of_range(ids: tuple[int, ...]) -> None:
    with pytest.raises(TrainingError, match=r"must ascend within 1\.\.3"):
        check_aux_layers(ids, LlamaConfig(num_hidden_layers=4))


def test_scaled_logits_are_read(tmp_path: Path) -> None:
    Gemma2Config().save_pretrained(tmp_path)
    assert read_verifier_config(tmp_path, False).final_logit_softcapping == 30.0


def test_unreadable_verifier(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="the verifier's config in .* cannot be read"):
        read_verifier_config(tmp_path, False)
