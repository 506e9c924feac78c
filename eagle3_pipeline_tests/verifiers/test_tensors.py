"""The tensors of a head are found in every layout that vLLM loads, and nothing else is taken for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as T
from safetensors.numpy import load_file, save_file

from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.verifiers.ask import ask
from eagle3_pipeline.verifiers.changes import changed_head
from eagle3_pipeline.verifiers.tensors import INDEX, head_tensors, stored_beside, weight_files

V, H = 40, 16
CONFIG: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def _table(first: float, rows: int = V) -> np.ndarray:
    return first + np.arange(rows * H, dtype=np.float32).reshape(rows, H)


def _folder(folder: Path, tensors: dict[str, np.ndarray], config: Any = None) -> Path:
    (config or T.LlamaConfig(**CONFIG)).save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _plain(prefix: str = "model.", rows: int = V) -> dict[str, np.ndarray]:
    return {
        f"{prefix}embed_tokens.weight": _table(0.0, rows),
        f"{prefix}norm.weight": np.full(H, 2.0, np.float32),
        "lm_head.weight": _table(0.5, rows),
    }


def test_layers_towers_and_projectors_have_norms_of_their_own(tmp_path: Path) -> None:
    others = {
        "model.layers.2.shared_head.norm.weight": np.zeros(H, np.float32),
        "model.layers.2.embed_tokens.weight": _table(9.0),
        "projector.norm.weight": np.zeros(H, np.float32),
        "norm.weight": np.zeros(3, np.float32),
    }
    found = head_tensors(_folder(tmp_path, {**others, **_plain()}))
    assert found.norm and (found.norm.name, found.embedding.name) == ("model.norm.weight", "model.embed_tokens.weight")
    np.testing.assert_array_equal(found.head.floats(slice(3, 4)), _table(0.5)[3:4])


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""])
def test_prefixes_of_wrappers(tmp_path: Path, prefix: str) -> None:
    tensors = {**_plain(prefix), "multi_modal_projector.norm.weight": np.zeros(H, np.float32)}
    if prefix == "language_model.model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    found = head_tensors(_folder(tmp_path, tensors))
    assert found.norm and found.norm.name == f"{prefix}norm.weight"


def test_several_files_without_an_index_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    """Mistral's own file of the same weights does not count."""
    _folder(tmp_path, _plain())
    (tmp_path / "model.safetensors").unlink()
    for number, (name, tensor) in enumerate(_plain().items(), 1):
        save_file({name: tensor}, tmp_path / f"model-{number}-of-3.safetensors")
    save_file({"lm_head.weight": _table(7.0)}, tmp_path / "consolidated.safetensors")
    assert [path.name for path in weight_files(tmp_path)] == [f"model-{n}-of-3.safetensors" for n in (1, 2, 3)]
    np.testing.assert_array_equal(head_tensors(tmp_path).head.floats(), _table(0.5))


def test_an_index_that_promises_what_is_not_there(tmp_path: Path) -> None:
    _folder(tmp_path, {"model.norm.weight": np.ones(H, np.float32)})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(_plain(), "model.safetensors")}))
    with pytest.raises(ConfigError, match=r"model.safetensors has no tensor model.embed_tokens.weight"):
        head_tensors(tmp_path)


def test_rows_beyond_the_vocabulary_are_left_out_and_missing_ones_are_told(tmp_path: Path) -> None:
    assert head_tensors(_folder(tmp_path / "more", _plain(rows=V + 8))).head.shape == (V + 8, H)
    with pytest.raises(ConfigError, match=rf"embed_tokens.weight is F32 \[39, {H}\], expected an unquantised \[{V}"):
        head_tensors(_folder(tmp_path / "less", _plain(rows=V - 1)))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ({"lm_head.qweight": np.zeros((2, 2), np.int32)}, r"stored as lm_head.qweight"),
        ({"lm_head.weight_packed": np.zeros((2, 2), np.int32)}, r"stored as lm_head.weight_packed"),
        ({"lm_head.weight": np.zeros((V, H), np.int8)}, r"lm_head.weight is I8"),
        ({"lm_head.weight": _table(0.5), "lm_head.weight_scale": np.ones(1, np.float32)}, "with lm_head.weight_scale"),
        ({}, r"lm_head.weight is missing"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_quantised_output_layer_is_not_taken_for_the_embeddings(
    tmp_path: Path, stored: dict[str, np.ndarray], message: str, tied: bool
) -> None:
    tensors = {name: value for name, value in _plain().items() if "lm_head" not in name}
    folder = _folder(tmp_path, {**tensors, **stored}, T.LlamaConfig(**CONFIG, tie_word_embeddings=tied))
    if tied and (not stored or "I8" in message):
        found = head_tensors(folder)
        assert found.head == found.embedding
        return
    with pytest.raises(ConfigError, match=message):
        head_tensors(folder)


def test_tying_is_the_configs_as_vllm_reads_it(tmp_path: Path) -> None:
    tied = T.LlamaConfig(**CONFIG, tie_word_embeddings=True)
    folder = _folder(tmp_path / "tied", _plain(), tied)
    found = head_tensors(folder)
    assert found.head == found.embedding
    # Release 0.1.0 took what was stored.
    assert stored_beside(folder, ask(folder)) and changed_head(folder)["verifier_head"]["tied"] is True
    same = {**_plain(), "lm_head.weight": _table(0.0)}
    folder = _folder(tmp_path / "same", same, tied)
    assert not stored_beside(folder, ask(folder)) and changed_head(folder) == {}


def test_a_wrapper_that_ties_by_default_leaves_a_stored_output_layer_alone(tmp_path: Path) -> None:
    text = T.MistralConfig(**CONFIG, tie_word_embeddings=False)
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = T.Mistral3Config(text_config=text.to_dict(), vision_config={**vision, "num_attention_heads": 2})
    folder = _folder(tmp_path, _plain("language_model.model."), config)
    assert ask(folder).tied, "that of the wrapper"
    np.testing.assert_array_equal(head_tensors(folder).head.floats(), _table(0.5))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    found = head_tensors(folder)
    assert found.head == found.embedding
