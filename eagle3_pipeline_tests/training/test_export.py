"""The exported folder: exact tensors, a config that vLLM reads, no path of this machine."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.draft_config import build_layer_config, read_verifier_config
from eagle3_pipeline.training.export import check_tensors, expected_tensors, export_draft
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.prepare import Bench, prepare
from eagle3_pipeline.training.simulate import simulate
from eagle3_pipeline_tests.training.conftest import AUX_LAYER_IDS, DRAFT_VOCAB, Events, SpecMaker, TrainedRun


@pytest.fixture
def bench(make_spec: SpecMaker, events: Events) -> Bench:
    return prepare(Job.parse(make_spec(ttt_steps=4)), events)


def test_tensors_and_config(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    export_draft(bench.model, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    shapes = {name: (str(t.dtype), list(t.shape)) for name, t in load_file(folder / "model.safetensors").items()}
    half = "torch.bfloat16"
    assert shapes == {
        "embed_tokens.weight": (half, [128, 32]),
        "fc.weight": (half, [32, 96]),
        "layers.0.hidden_norm.weight": (half, [32]),
        "layers.0.input_layernorm.weight": (half, [32]),
        "layers.0.self_attn.q_proj.weight": (half, [32, 64]),
        "layers.0.self_attn.k_proj.weight": (half, [16, 64]),
        "layers.0.self_attn.v_proj.weight": (half, [16, 64]),
        "layers.0.self_attn.o_proj.weight": (half, [32, 32]),
        "layers.0.post_attention_layernorm.weight": (half, [32]),
        "layers.0.mlp.gate_proj.weight": (half, [64, 32]),
        "layers.0.mlp.up_proj.weight": (half, [64, 32]),
        "layers.0.mlp.down_proj.weight": (half, [32, 64]),
        "norm.weight": (half, [32]),
        "lm_head.weight": (half, [DRAFT_VOCAB, 32]),
        "d2t": ("torch.int64", [DRAFT_VOCAB]),
        "t2d": ("torch.bool", [128]),
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == AUX_LAYER_IDS
    assert config["speculators_model_type"] == "eagle3"
    assert config["draft_vocab_size"] == DRAFT_VOCAB
    assert (config["norm_before_residual"], config["norm_before_fc"]) == (True, False)
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    verifier = config["speculators_config"]["verifier"]
    assert verifier == {"name_or_path": str(bench.job.verifier_path), "architectures": ["LlamaForCausalLM"]}
    layers = config["transformer_layer_config"]
    assert layers["layer_types"] == ["full_attention"]
    assert layers.get("sliding_window") is None
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 5000.0}
    assert {k: layers[k] for k in ("head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size")} == {
        "head_dim": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    assert "auto_map" not in config


def test_norm_before_fc_has_its_own_tensor(make_spec: SpecMaker, events: Events, tmp_path: Path) -> None:
    spec = make_spec()
    spec["draft"]["norm_before_fc"] = True
    export_draft(prepare(Job.parse(spec), events).model, tmp_path / "draft")
    assert list(load_file(tmp_path / "draft" / "model.safetensors")["input_norm.weight"].shape) == [96]


def test_a_value_that_is_not_finite_is_not_exported(bench: Bench, tmp_path: Path) -> None:
    with torch.no_grad():
        bench.model.fc.weight[0, 0] = torch.nan
    with pytest.raises(TrainingError, match=r"fc.weight holds values that are not finite"):
        export_draft(bench.model, tmp_path / "draft")
    assert not (tmp_path / "draft").exists()


def test_differences_are_listed(verifier: tuple[Path, object], make_spec: SpecMaker, tmp_path: Path) -> None:
    layers = build_layer_config(Job.parse(make_spec()).draft, read_verifier_config(verifier[0], False))
    expected = expected_tensors(layers, DRAFT_VOCAB, 3, False)
    types = {"BF16": torch.bfloat16, "I64": torch.int64, "BOOL": torch.bool}
    tensors = {name: torch.zeros(shape, dtype=types[dtype]) for name, (dtype, shape) in expected.items()}
    del tensors["norm.weight"]
    tensors["fc.weight"] = torch.zeros(32, 64)
    tensors["stray"] = torch.zeros(1)
    save_file(tensors, tmp_path / "draft.safetensors")
    with pytest.raises(TrainingError) as error:
        check_tensors(tmp_path / "draft.safetensors", expected)
    assert str(error.value).splitlines()[1:] == [
        "  fc.weight: found ('F32', [32, 64]), expected ('BF16', [32, 96])",
        "  norm.weight: found none, expected ('BF16', [32])",
        "  stray: found ('F32', [1]), expected none",
    ]


def broken(folder: Path, trained: TrainedRun, damage: str) -> Path:
    """A copy of a good export with one thing wrong."""
    shutil.copytree(trained.output, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if damage == "norm flag":
        config["norm_before_residual"] = not config["norm_before_residual"]
    elif damage == "absolute ids":
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    elif damage == "layer ids":
        config["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in config["eagle_aux_hidden_state_layer_ids"]]
    elif damage == "missing norm":
        del tensors["norm.weight"]
    elif damage == "head size":
        config["transformer_layer_config"]["head_dim"] = 16
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("norm flag", "norm_before_residual is False, expected True"),
        ("absolute ids", "d2t holds offsets|another draft vocabulary|leaves the verifier's vocabulary"),
        ("layer ids", r"eagle_aux_hidden_state_layer_ids is \[2, 3, 4\], expected \[1, 2, 3\]"),
        ("missing norm", "norm.weight"),
        ("head size", "head_dim is 16, expected 8"),
    ],
)
def test_a_wrong_export_is_refused_before_it_is_served(
    trained: TrainedRun, chunks: list[dict[str, str]], events: Events, tmp_path: Path, damage: str, message: str
) -> None:
    folder = broken(tmp_path / "draft", trained, damage)
    spec = {**trained.spec, "job": "simulate", "chunks": chunks, "num_steps": 2, "checkpoint": str(folder)}
    with pytest.raises(TrainingError, match=message):
        simulate(Job.parse(spec), events)


def test_the_right_export_passes(trained: TrainedRun, chunks: list[dict[str, str]], events: Events) -> None:
    spec = {**trained.spec, "job": "simulate", "chunks": chunks, "num_steps": 2, "checkpoint": str(trained.output)}
    assert simulate(Job.parse(spec), events)["num_positions"] > 0
