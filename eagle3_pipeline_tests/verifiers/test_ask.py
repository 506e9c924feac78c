"""A verifier's class is asked, by what it does: norm, factor, cap, config values that follow from others."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers as T

from eagle3_pipeline.data.verifier import _inspect
from eagle3_pipeline.verifiers import ask as asking
from eagle3_pipeline.verifiers.ask import ask
from eagle3_pipeline.verifiers.changes import changed_head, changed_width
from eagle3_pipeline.verifiers.formula import HeadFormula
from eagle3_pipeline.verifiers.sizes import max_positions, mlp_width
from eagle3_pipeline_tests.tiny_kimi import make_tiny_kimi
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _save(config: Any, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


# Formulas as the model code of each family writes them down.
FORMULAS: list[tuple[Any, HeadFormula]] = [
    (T.LlamaConfig(**SIZES, rms_norm_eps=3e-5), HeadFormula("rms", 0.0, 3e-5)),
    (T.Gemma2Config(**SIZES, final_logit_softcapping=25.0), HeadFormula("rms", 1.0, 1e-6, softcap=25.0)),
    (T.Gemma4TextConfig(**SIZES, final_logit_softcapping=None), HeadFormula("rms", 0.0, 1e-6)),
    (T.GraniteConfig(**SIZES, logits_scaling=16.0), HeadFormula("rms", 0.0, 1e-6, scale=1 / 16)),
    (T.CohereConfig(**SIZES, logit_scale=0.25), HeadFormula("layer", 0.0, 1e-5, scale=0.25)),
    (T.FalconH1Config(**SIZES, lm_head_multiplier=0.5), HeadFormula("rms", 0.0, 1e-5, scale=0.5)),
    (T.NemotronConfig(**SIZES, head_dim=64, norm_eps=2e-5), HeadFormula("layer", 1.0, 2e-5)),
    (T.PhiConfig(**SIZES, layer_norm_eps=1e-4), HeadFormula("layer", 0.0, 1e-4)),
]


@pytest.mark.parametrize(("config", "expected"), FORMULAS, ids=[type(c).__name__ for c, _ in FORMULAS])
def test_formulas(config: Any, expected: HeadFormula, tmp_path: Path) -> None:
    assert ask(_save(config, tmp_path)).formula == expected


def test_minicpm_scales_by_a_quotient_of_other_keys(tmp_path: Path) -> None:
    sizes = {**SIZES, "num_key_value_heads": 2}
    found = ask(_save(T.MiniCPM3Config(**sizes, dim_model_base=32, scale_emb=1, scale_depth=1.0), tmp_path)).formula
    assert found and found.scale == 32 / 128


def test_a_class_without_a_final_norm_behind_its_layers_has_no_formula(tmp_path: Path) -> None:
    asked = ask(_save(T.OPTConfig(), tmp_path))
    assert asked.formula is None and "OPTForCausalLM has no norm behind its layers" in asked.formula_source


def test_a_type_that_transformers_does_not_know_is_read_as_it_is_written(tmp_path: Path) -> None:
    config = {"model_type": "brand_new", "layernorm_epsilon": 1e-3, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ask(tmp_path)
    assert asked.config == config and asked.formula == HeadFormula("rms", 0.0, 1e-3)
    assert "its class cannot be asked" in asked.formula_source
    (tmp_path / "config.json").write_text(json.dumps({**config, "logit_scale": 0.5}))
    asked = ask(tmp_path)
    assert asked.formula is None and "logit_scale 0.5" in asked.formula_source


def test_a_model_class_of_transformers_is_asked_without_the_code_that_comes_with_a_model(tmp_path: Path) -> None:
    asked = ask(make_tiny_kimi(tmp_path))
    assert asked.formula == HeadFormula("rms", 0.0, 1e-5)
    assert asked.formula_source == "measured on DeepseekV3ForCausalLM"


def test_values_that_follow_from_others_are_the_classs(tmp_path: Path) -> None:
    layers = ["mamba", "attention", "moe", "mamba", "attention"]
    config = ask(_save(T.NemotronHConfig(vocab_size=320, hidden_size=128, layers_block_type=layers), tmp_path)).config
    assert config["num_hidden_layers"] == 5
    nested = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    config = ask(tmp_path).config
    expected = T.Gemma3TextConfig(hidden_size=128)
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"):
        assert config[name] == getattr(expected, name)


def test_facts_of_a_plain_verifier(tmp_path: Path) -> None:
    verifier = _inspect(make_tiny_llama(tmp_path))
    found = (verifier.num_layers, verifier.hidden_size, verifier.vocab_size, verifier.max_positions)
    assert found == (8, 128, 320, 1024)
    # 2 bytes x (keys and values) x 1 head of 64 x 8 layers
    assert verifier.kv_bytes_per_token == 2 * 2 * 64 * 8 and not verifier.has_experts


def test_an_answer_of_another_process_is_the_same_and_is_remembered(tmp_path: Path) -> None:
    folder = _save(T.GraniteConfig(**SIZES, logits_scaling=16.0), tmp_path / "model")
    code = (
        "import sys\nfrom pathlib import Path\nfrom eagle3_pipeline.verifiers import ask as asking\n"
        "if len(sys.argv) > 2:\n    asking.subprocess = None\n"
        "print(asking.ask(Path(sys.argv[1])).formula, 'torch' in sys.modules)"
    )
    environment = {**os.environ, "EAGLE3_HOME": str(tmp_path / "home")}
    for more in ([], ["remembered"]):
        command = [sys.executable, "-c", code, str(folder), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
        assert done.stdout.strip() == f"{ask(folder).formula} False"


def test_a_failing_question_is_answered_by_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _save(T.LlamaConfig(**SIZES, rms_norm_eps=7e-5), tmp_path / "model")
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(asking.sys, "modules", {})
    monkeypatch.setattr(asking.sys, "executable", "/nowhere/python")
    asking._answer.cache_clear()
    asked = ask(folder)
    asking._answer.cache_clear()
    assert asked.formula == HeadFormula("rms", 0.0, 7e-5) and "Transformers cannot be asked" in asked.formula_source
    assert not (tmp_path / "home").exists(), "nothing to remember"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({}, 0),
        ({"n_positions": 64, "max_position_embeddings": 128}, 64),
        ({"max_position_embeddings": 128, "model_max_length": 512}, 512),
        ({"max_position_embeddings": 128, "rope_scaling": {"type": "linear", "factor": 4.0}}, 512),
        (_yarn := {"max_position_embeddings": 256, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 256),
        (_yarn | {"rope_parameters": {**_yarn["rope_parameters"], "original_max_position_embeddings": 256}}, 1024),  # type: ignore[dict-item]
        ({"max_position_embeddings": 1024, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 1024),
        (
            {"max_position_embeddings": 64, "rope_parameters": {"a": {"rope_type": "dynamic", "factor": 2.0}, "b": {}}},
            128,
        ),
    ],
)
def test_positions(config: dict[str, Any], expected: int) -> None:
    assert max_positions(config) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 8, "intermediate_size": 4}, 4),
        ({"hidden_size": 8}, None),
        # gpt-oss and MiniMax-M2: an expert's size, top-4 and top-8.
        ({"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}, 11520),
        ({"hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8}, 12288),
        # A dense size beside the experts'.
        ({"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128}, 6144),
        (
            {
                "hidden_size": 2048,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts": 64,
                "num_experts_per_tok": 10,
            },
            5632,
        ),
    ],
)
def test_width_of_the_mlp(config: dict[str, Any], expected: int | None) -> None:
    assert mlp_width(config) == expected


def test_only_what_0_1_0_did_otherwise_enters_fingerprints(tmp_path: Path) -> None:
    same = {
        "llama": T.LlamaConfig(**SIZES),
        "tied": T.Qwen3Config(**SIZES, tie_word_embeddings=True),
        "gemma3": T.Gemma3TextConfig(**SIZES),
        "qwen3_5": T.Qwen3_5TextConfig(**SIZES),
        "granite": T.GraniteConfig(**SIZES),
        "deepseek": T.DeepseekV3Config(),
    }
    other: dict[str, tuple[Any, dict[str, Any]]] = {
        "qwen3_next": (T.Qwen3NextConfig(**SIZES), {"gain_offset": 1.0}),
        "gemma2": (T.Gemma2Config(**SIZES), {"softcap": 30.0}),
        "cohere": (T.CohereConfig(**SIZES), {"norm": "layer", "scale": 0.0625}),
        "granite_scaled": (T.GraniteConfig(**SIZES, logits_scaling=3.0), {"scale": 0.333333}),
        "phi": (T.PhiConfig(**SIZES), {"norm_bias": True, "head_bias": True}),
        "lfm2": (T.Lfm2Config(**SIZES, norm_eps=1e-5, layer_types=["conv"] * 4), {"eps": 1e-5}),
    }
    for name, config in same.items():
        assert changed_head(_save(config, tmp_path / name)) == {}, name
    for name, (config, expected) in other.items():
        found = changed_head(_save(config, tmp_path / name))["verifier_head"]
        assert expected.items() <= found.items(), name
    assert changed_width(tmp_path / "llama") == changed_width(tmp_path / "deepseek") == {}
    sizes = {**SIZES, "intermediate_size": 128, "num_local_experts": 4, "num_experts_per_tok": 2}
    assert changed_width(_save(T.GptOssConfig(**sizes), tmp_path / "moe")) == {"draft_intermediate_size": 256}
