"""What training, export and evaluation refuse by settings and verifier alone, preflight refuses first.

Each case is refused by the later stage's own code, with the same words.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as T
from safetensors.numpy import load_file, save_file

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import Eagle3Error, PreflightError
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_checkpoint import _warm_start
from eagle3_pipeline.stages.engines import open_engine
from eagle3_pipeline.stages.preflight import pipeline_checks, preflight
from eagle3_pipeline.training.draft_config import build_layer_config, expected_tensors, read_verifier_config
from eagle3_pipeline.training.draft_model import load_verifier_weights
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

DTYPES = {"BF16": np.uint16, "I64": np.int64, "BOOL": np.bool_}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


def _context(folder: Path, home: Path, **sections: dict[str, Any]) -> StageContext:
    content: dict[str, dict[str, Any]] = {
        "verifier": {"model": str(folder)},
        "dataset": {"path": "none", "samples_per_chunk": 10},
        "generation": {"max_new_tokens": 8, "max_sequence_tokens": 128},
        "vocab": {"draft_vocab_size": 64},
        "evaluation": {"max_new_tokens": 8},
        "resources": {"num_gpus": 0},
    }
    merged = {key: {**content.get(key, {}), **sections.get(key, {})} for key in {**content, **sections}}
    return StageContext(PipelineSpec.model_validate({"name": "p", **merged}), lambda _line: None, home)


def _failed(context: StageContext) -> list[str]:
    return [check.line() for check in pipeline_checks(context) if not check.passed]


def test_a_pipeline_that_fits_passes(llama: Path, tmp_path: Path) -> None:
    assert _failed(_context(llama, tmp_path)) == []


SETTINGS: list[tuple[dict[str, dict[str, Any]], str]] = [
    ({"draft": {"num_attention_heads": 3, "num_key_value_heads": 2}}, "3 is not a multiple of"),
    ({"draft": {"num_attention_heads": -2}}, "draft.num_attention_heads -2 must be above 0"),
    ({"draft": {"head_dim": 33}}, "draft.head_dim 33 must be even"),
    ({"draft": {"intermediate_size": -1}}, "draft.intermediate_size -1 must be above 0"),
    ({"draft": {"max_position_embeddings": 4096}}, "exceeds the verifier's 1024"),
    ({"draft": {"max_position_embeddings": 64}}, "positions of the draft: found 64, needed 128"),
    ({"training": {"warm_start": "/nowhere/draft"}}, "/nowhere/draft has no model.safetensors"),
    ({"training": {"device": "cuda"}}, "training.device: found cuda with 0 GPUs"),
    ({"training": {"attention": "flex_attention"}}, "training.attention: found flex_attention"),
    ({"training": {"num_processes": 2}}, "batches of a training step: found 1, needed 2"),
    ({"vocab": {"draft_vocab_size": 321}}, "draft vocabulary: found 321, needed 320 at most"),
    ({"evaluation": {"max_new_tokens": 125}}, "exceed generation.max_sequence_tokens 128"),
    ({"evaluation": {"prompts": "/nowhere/prompts.jsonl"}}, "/nowhere/prompts.jsonl cannot be read"),
    ({"capture": {"aux_layer_ids": [1, 2, 8]}}, "capture.aux_layer_ids [1, 2, 8]"),
    ({"dataset": {"max_samples": 8}}, "dataset.max_samples 8, needed more than training.min_validation_samples, 8"),
]


@pytest.mark.parametrize(("sections", "message"), SETTINGS, ids=[message for _, message in SETTINGS])
def test_settings(llama: Path, tmp_path: Path, sections: dict[str, dict[str, Any]], message: str) -> None:
    context = _context(llama, tmp_path, **sections)
    assert any(message in check.line() for check in preflight(context) if not check.passed)
    # Evaluation prompts are checked before a selection runs that needs them.
    assert "evaluation" in sections or any(message in line for line in _failed(context)), _failed(context)


def test_draft_heads_are_split_over_the_gpus_of_an_engine(llama: Path, tmp_path: Path) -> None:
    resources = {"num_gpus": 4, "tensor_parallel_size": 4}
    (line,) = _failed(_context(llama, tmp_path, resources=resources))
    assert "draft over the GPUs of an engine: found 2 heads, 1 of keys, MLP of 256, needed multiples of 4" in line
    draft = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert _failed(_context(llama, tmp_path, resources=resources, draft=draft)) == []


SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS: list[tuple[Any, str]] = [
    (T.Qwen3_5TextConfig(**SIZES), "draft.rope_theta must be given"),
    (T.Glm4Config(**SIZES), "draft.rope_theta must be given"),
    (T.Phi3Config(**SIZES, partial_rotary_factor=0.75, pad_token_id=0), "draft.rope_theta must be given"),
    (T.DeepseekV3Config(**{**SIZES, "num_key_value_heads": 2}), "draft.head_dim must be given"),
    (T.OlmoConfig(**SIZES, pad_token_id=0), "draft.rms_norm_eps must be given"),
    (T.MambaConfig(vocab_size=320, hidden_size=128, num_hidden_layers=8), "draft.num_attention_heads must be given"),
    (
        T.MiniMaxM2Config(**{**SIZES, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
        "draft.intermediate_size must be given",
    ),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[type(config).__name__ for config, _ in CONFIGS])
def test_geometry_that_does_not_follow_from_the_verifier(
    llama: Path, tmp_path: Path, config: Any, message: str
) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    config.save_pretrained(folder)
    context = _context(folder, tmp_path)
    with pytest.raises(Eagle3Error, match=message):
        build_layer_config(context.spec.draft, read_verifier_config(folder, False))
    assert any(message in line for line in _failed(context)), _failed(context)


def _drop(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda tensors: {name: value for name, value in tensors.items() if name not in names}


def _quantise(tensors: dict[str, Any]) -> dict[str, Any]:
    head = tensors["lm_head.weight"].astype(np.int32)
    return {**_drop("lm_head.weight")(tensors), "lm_head.qweight": head}


def _wider(tensors: dict[str, Any]) -> dict[str, Any]:
    return {**tensors, "model.norm.weight": np.ones(129, np.float32)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop("lm_head.weight"), "the verifier's lm_head.weight is missing"),
        (_drop("model.norm.weight"), "the verifier's model.norm.weight is missing"),
        (_drop("model.embed_tokens.weight"), "the verifier's model.embed_tokens.weight is missing"),
        (_quantise, "the verifier's lm_head.weight is stored as lm_head.qweight"),
        (_wider, "model.norm.weight is F32 [129], expected an unquantised [128]"),
    ],
)
def test_weights(llama: Path, tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]], message: str) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Eagle3Error) as refused:
        load_verifier_weights(folder, read_verifier_config(folder, False))
    assert message in str(refused.value)
    (line,) = _failed(_context(folder, tmp_path))
    assert message in line


def test_logits_of_no_known_formula(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "model_type": "brand_new", "architectures": ["New"], "logit_scale": 3})
    )
    lines = _failed(_context(folder, tmp_path))
    assert any("verifier's head" in line and "logit_scale 3" in line for line in lines)


def _checkpoint(folder: Path, context: StageContext, **changes: list[int]) -> dict[str, Any]:
    layers = build_layer_config(context.spec.draft, read_verifier_config(Path(context.verifier.path), False))
    tensors = {
        n: np.zeros(changes.get(n, shape), DTYPES[d])
        for n, (d, shape) in expected_tensors(layers, 64, 3, False).items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_weights_to_start_from(llama: Path, tmp_path: Path) -> None:
    """A checkpoint of another vocabulary is taken, one of another geometry is not."""
    draft = tmp_path / "draft"
    context = _context(llama, tmp_path, training={"warm_start": str(draft)})
    tensors = _checkpoint(draft, context)
    assert _failed(context) == [] and _warm_start(context) == draft
    assert _failed(_context(llama, tmp_path, training={"warm_start": str(draft)}, vocab={"draft_vocab_size": 50})) == []
    (line,) = _failed(_context(llama, tmp_path, training={"warm_start": str(draft)}, draft={"head_dim": 32}))
    assert "does not fit this draft's geometry: layers.0.self_attn.k_proj.weight: [64, 256], expected [32, 256]" in line
    save_file({**tensors, "d2t": np.full(64, 300)}, draft / "model.safetensors")
    (line,) = _failed(context)
    assert "its d2t leaves the verifier's vocabulary of 320" in line
    save_file({"norm.weight": np.zeros(2)}, draft / "model.safetensors")
    (line,) = _failed(context)
    assert "it is not a draft checkpoint" in line


def test_none_of_it_starts_an_engine(llama: Path, tmp_path: Path) -> None:
    context = _context(llama, tmp_path, draft={"head_dim": 33})
    with pytest.raises(PreflightError, match="FAIL  geometry of the draft: found draft.head_dim 33 must be even"):
        open_engine(context, context.engine_spec())
    assert context.engines.starts() == []


def test_yarn_whose_positions_are_those_before_the_scaling(llama: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(llama, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("rope_parameters", None)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config |= {"max_position_embeddings": 64, "rope_theta": 10000.0, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    assert _failed(_context(folder, tmp_path)) == []
    generation = {"max_sequence_tokens": 300}
    lines = _failed(_context(folder, tmp_path, generation=generation))
    assert any("positions of the verifier: found 256, needed 300" in line for line in lines)
