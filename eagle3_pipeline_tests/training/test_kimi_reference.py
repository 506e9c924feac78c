"""The reference draft of Kimi-K2.5, at its real size without memory: on the meta device, and as sparse files."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig

import eagle3_pipeline
from eagle3_pipeline.config import DraftSpec, PipelineSpec, load_pipeline
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.draft_config import build_layer_config, check_aux_layers, read_verifier_config
from eagle3_pipeline.training.draft_model import VerifierWeights, VocabMap, build_draft
from eagle3_pipeline.training.export import check_export, check_tensors, expected_tensors
from eagle3_pipeline.training.job import Job

# What speculators does with the vocabulary map has no effect without memory.
pytestmark = pytest.mark.filterwarnings("ignore:for (t2d|d2t). copying from a non-meta")
# config.json of the verifier: what a draft could depend on.
KIMI_K25: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
    },
}
# The published reference draft, tensor by tensor.
REFERENCE = {
    "embed_tokens.weight": ("BF16", [163840, 7168]),
    "fc.weight": ("BF16", [7168, 21504]),
    "layers.0.input_layernorm.weight": ("BF16", [7168]),
    "layers.0.hidden_norm.weight": ("BF16", [7168]),
    "layers.0.self_attn.q_proj.weight": ("BF16", [8192, 14336]),
    "layers.0.self_attn.k_proj.weight": ("BF16", [8192, 14336]),
    "layers.0.self_attn.v_proj.weight": ("BF16", [8192, 14336]),
    "layers.0.self_attn.o_proj.weight": ("BF16", [7168, 8192]),
    "layers.0.post_attention_layernorm.weight": ("BF16", [7168]),
    "layers.0.mlp.gate_proj.weight": ("BF16", [18432, 7168]),
    "layers.0.mlp.up_proj.weight": ("BF16", [18432, 7168]),
    "layers.0.mlp.down_proj.weight": ("BF16", [7168, 18432]),
    "norm.weight": ("BF16", [7168]),
    "lm_head.weight": ("BF16", [32000, 7168]),
    "d2t": ("I64", [32000]),
    "t2d": ("BOOL", [163840]),
}
ITEM_BYTES = {"BF16": 2, "I64": 8, "BOOL": 1}
TYPES = {torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}


@pytest.fixture(scope="module")
def spec() -> PipelineSpec:
    return load_pipeline(Path(eagle3_pipeline.__file__).parent / "pipelines" / "kimi_k25.yaml")


@pytest.fixture(scope="module")
def verifier_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    (folder / "config.json").write_text(json.dumps(KIMI_K25))
    return folder


@pytest.fixture(scope="module")
def verifier(verifier_path: Path) -> PretrainedConfig:
    return read_verifier_config(verifier_path, trust_remote_code=False)


@pytest.fixture(scope="module")
def vocab_map() -> VocabMap:
    """The first 32000 tokens: every offset is 0."""
    return VocabMap(torch.arange(163840) < 32000, torch.zeros(32000, dtype=torch.int64))


@pytest.fixture(scope="module")
def job(spec: PipelineSpec, verifier_path: Path) -> Job:
    aux = tuple(spec.capture.aux_layer_ids or ())
    return Job("train", verifier_path, "kimi", False, aux, spec.draft, spec.training, (), Path())


def without_memory(job: Job, verifier: PretrainedConfig, vocab_map: VocabMap) -> Any:
    """The draft as training builds it, on the meta device."""
    with torch.device("meta"):
        table = torch.empty(163840, 7168, dtype=torch.bfloat16)
        weights = VerifierWeights(table, table.clone(), torch.empty(7168))
        return build_draft(job, build_layer_config(job.draft, verifier), verifier, weights, vocab_map)


def write_sparse(path: Path, tensors: dict[str, tuple[str, list[int]]], t2d: bytes) -> None:
    """A safetensors file that takes no space: all zeros but `t2d`."""
    header: dict[str, Any] = {}
    end = 0
    # Eight-byte values first, so that all are aligned.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        start, end = end, end + ITEM_BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        file.seek(8 + len(text) + header["t2d"]["data_offsets"][0])
        file.write(t2d)


def test_the_reference_tensors(job: Job, verifier: PretrainedConfig, vocab_map: VocabMap) -> None:
    check_aux_layers(job.aux_layer_ids, verifier)
    model = without_memory(job, verifier, vocab_map).to(dtype=torch.bfloat16)
    exported = {n: v for n, v in model.state_dict().items() if n not in model._keys_to_ignore_on_save}
    assert {n: (TYPES[v.dtype], list(v.shape)) for n, v in exported.items()} == REFERENCE
    assert expected_tensors(build_layer_config(job.draft, verifier), 32000, 3, False) == REFERENCE
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == REFERENCE.keys() - {"embed_tokens.weight", "d2t", "t2d"}
    num_bytes = sum(ITEM_BYTES[dtype] * math.prod(shape) for dtype, shape in REFERENCE.values())
    assert round(num_bytes / 1e9, 2) == 4.73


def test_the_reference_config(job: Job, verifier: PretrainedConfig, vocab_map: VocabMap) -> None:
    config = without_memory(job, verifier, vocab_map).config.to_dict()
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 30, 58]
    assert config["draft_vocab_size"] == 32000
    layers = config["transformer_layer_config"]
    assert layers["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert {k: layers[k] for k in ("rms_norm_eps", "max_position_embeddings", "vocab_size")} == {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "vocab_size": 163840,
    }


def test_the_head_size_must_be_given(spec: PipelineSpec, verifier: PretrainedConfig) -> None:
    draft = DraftSpec(**{**spec.draft.model_dump(), "head_dim": None})
    with pytest.raises(TrainingError, match=r"draft.head_dim must be given: .*multi-head latent attention"):
        build_layer_config(draft, verifier)


def test_tensors_of_another_head_size_are_refused(tmp_path: Path, vocab_map: VocabMap) -> None:
    half = {n: (dtype, [4096 if size == 8192 else size for size in shape]) for n, (dtype, shape) in REFERENCE.items()}
    t2d = vocab_map.t2d.numpy().tobytes()
    write_sparse(tmp_path / "half.safetensors", half, t2d)
    with pytest.raises(TrainingError) as error:
        check_tensors(tmp_path / "half.safetensors", REFERENCE)
    assert str(error.value).splitlines()[1:] == [
        "  layers.0.self_attn.k_proj.weight: found ('BF16', [4096, 14336]), expected ('BF16', [8192, 14336])",
        "  layers.0.self_attn.o_proj.weight: found ('BF16', [7168, 4096]), expected ('BF16', [7168, 8192])",
        "  layers.0.self_attn.q_proj.weight: found ('BF16', [4096, 14336]), expected ('BF16', [8192, 14336])",
        "  layers.0.self_attn.v_proj.weight: found ('BF16', [4096, 14336]), expected ('BF16', [8192, 14336])",
    ]
    write_sparse(tmp_path / "right.safetensors", REFERENCE, t2d)
    check_tensors(tmp_path / "right.safetensors", REFERENCE)


def test_a_config_of_another_head_size_is_refused(
    job: Job, verifier: PretrainedConfig, vocab_map: VocabMap, tmp_path: Path
) -> None:
    write_sparse(tmp_path / "model.safetensors", REFERENCE, vocab_map.t2d.numpy().tobytes())
    without_memory(job, verifier, vocab_map).config.save_pretrained(tmp_path)
    layers = build_layer_config(job.draft, verifier)
    check_export(tmp_path, job, layers, vocab_map)
    config = json.loads((tmp_path / "config.json").read_text())
    config["transformer_layer_config"]["head_dim"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainingError, match="head_dim is 64, expected 128"):
        check_export(tmp_path, job, layers, vocab_map)
