"""The verifier's folder: whole or refused, identified by content."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3_pipeline.config import CaptureSpec, PipelineSpec, VerifierSpec
from eagle3_pipeline.data.verifier import Verifier, resolve_verifier
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.verifiers.sizes import has_recurrent_layers, length_switches

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 12,
    "hidden_size": 16,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


def _weights(path: Path, value: float = 1.0) -> None:
    save_file({"w": np.full((4, 4), value, dtype=np.float32)}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of two weight files with an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        _weights(folder / name, number)
        weight_map[f"w{number}"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _resolve(folder: Path) -> Verifier:
    return resolve_verifier(VerifierSpec(model=str(folder)))


def test_the_geometry_is_read_from_the_config(folder: Path) -> None:
    verifier = _resolve(folder)
    sizes = (verifier.num_layers, verifier.hidden_size, verifier.vocab_size, verifier.max_positions)
    assert sizes == (12, 16, 50, 128)
    assert verifier.architecture == "LlamaForCausalLM"
    assert verifier.weight_bytes == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert verifier.path == str(folder)


def test_a_nested_text_config_counts(folder: Path) -> None:
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "hidden_size": 1, "text_config": CONFIG}
    (folder / "config.json").write_text(json.dumps(nested))
    verifier = _resolve(folder)
    assert (verifier.hidden_size, verifier.num_layers) == (16, 12)
    assert verifier.architecture == "KimiK25ForConditionalGeneration"


def test_a_config_that_lacks_keys_names_them(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 3}))
    with pytest.raises(ConfigError, match=r"config\.json lacks num_hidden_layers, vocab_size"):
        _resolve(folder)


@pytest.mark.parametrize("content", [None, "{ torn", "[]", "7"])
def test_an_unreadable_config_is_refused(folder: Path, content: str | None) -> None:
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        _resolve(folder)


def test_a_missing_weight_file_of_the_index_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of 2 weight files: model-00002-of-00002\.safetensors"):
        _resolve(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"has no \.safetensors weights"):
        _resolve(folder)


@pytest.mark.parametrize("change", [-1, -20, 1])
def test_a_weight_file_of_another_length_than_its_header_says_is_refused(folder: Path, change: int) -> None:
    path = folder / "model-00001-of-00002.safetensors"
    data = path.read_bytes()
    path.write_bytes(data + b"x" if change > 0 else data[:change])
    expected = f"has {len(data) + change:,} bytes, its header says {len(data):,}: fetch it again"
    with pytest.raises(ConfigError, match=expected):
        _resolve(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05",
        bytes(64),
        b"\xff" * 64,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        (2).to_bytes(8, "little") + b"[]",
        (10).to_bytes(8, "little") + b'{"w": {}} ',
        (8).to_bytes(8, "little") + b'{"w": 1}',
    ],
)
def test_what_is_no_safetensors_file_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="model-00001-of-00002.safetensors"):
        _resolve(folder)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(ConfigError, match=r"verifier\.model: there is no folder /no/such/model"):
        _resolve(Path("/no/such/model"))


def _other_weights(folder: Path) -> None:
    _weights(folder / "model-00002-of-00002.safetensors", 2.5)


def _other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def _other_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 5.0}))


@pytest.mark.parametrize("change", [_other_weights, _other_template, _other_config])
def test_changed_files_are_another_verifier(folder: Path, change: Callable[[Path], None]) -> None:
    before = _resolve(folder).content_id
    change(folder)
    assert _resolve(folder).content_id != before


def test_a_moved_folder_is_the_same_verifier(folder: Path, tmp_path: Path) -> None:
    before = _resolve(folder)
    shutil.copytree(folder, tmp_path / "elsewhere" / "copy")
    shutil.rmtree(folder)
    after = _resolve(tmp_path / "elsewhere" / "copy")
    assert after.content_id == before.content_id and after.path != before.path


def test_files_that_no_model_reads_do_not_count(folder: Path) -> None:
    before = _resolve(folder).content_id
    (folder / "README.md").write_text("about")
    (folder / ".cache").mkdir()
    assert _resolve(folder).content_id == before


@pytest.mark.parametrize(
    ("ids", "expected"),
    [(None, (2, 6, 9, 12)), ([9, 1, 5], (1, 5, 9, 12)), ([1, 10, 11], (1, 10, 11, 12))],
)
def test_layers_are_captured_in_ascending_order_with_the_last_one_behind(
    folder: Path, ids: list[int] | None, expected: tuple[int, ...]
) -> None:
    geometry = _resolve(folder).geometry(CaptureSpec(aux_layer_ids=ids))
    assert geometry.layer_ids == expected and geometry.row_bytes == 4 * 16 * 2


@pytest.mark.parametrize("ids", [[0, 5, 9], [1, 5, 12], [-1, 5, 9], [5, 5, 9]])
def test_layers_out_of_range_or_twice_are_refused(folder: Path, ids: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"expected three different ids from 1 to 11; the verifier has 12 layers"):
        _resolve(folder).geometry(CaptureSpec(aux_layer_ids=ids))


def test_a_verifier_too_small_for_the_default_layers_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"capture\.aux_layer_ids \[2, 2, 1\]"):
        _resolve(folder).geometry(CaptureSpec())


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts", "num_local_experts"])
def test_experts_are_known_by_the_names_that_models_give_them(folder: Path, key: str) -> None:
    assert not _resolve(folder).has_experts
    (folder / "config.json").write_text(json.dumps({"text_config": {**CONFIG, key: 8}}))
    assert _resolve(folder).has_experts


def _config(**keys: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": 8, "hidden_size": 8, "vocab_size": 40, "max_position_embeddings": 1024}
    return {**sizes, **keys}


LONGROPE = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "original_max_position_embeddings": 64}}


@pytest.mark.parametrize(
    ("longest", "length", "switched"),
    # A position more than the longest sequence, but not across the limit for its sake, nor beyond the last one.
    [(63, 64, False), (64, 64, False), (65, 66, True), (1023, 1024, True), (1024, 1024, True), (1025, 1026, True)],
)
def test_an_engine_is_not_longer_than_its_sequences_need(longest: int, length: int, switched: bool) -> None:
    verifier = Verifier(
        "m", "c", 8, 8, 40, 1024, 0, 0, "Phi3ForCausalLM", length_switches=length_switches(_config(**LONGROPE))
    )
    assert verifier.engine_length(longest) == length
    assert bool(verifier.switched_on(longest)) is switched


def test_most_verifiers_compute_alike_in_engines_of_any_length() -> None:
    assert length_switches(_config(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 64})) == {}
    assert length_switches(_config(model_type="llama4_text")) == {"temperature tuning of attention": 32768}
    verifier = Verifier("m", "c", 8, 8, 40, 1024, 0, 0, "LlamaForCausalLM")
    assert [verifier.engine_length(n) for n in (64, 1023, 1024, 2000)] == [65, 1024, 1024, 2001]


@pytest.mark.parametrize(
    ("keys", "recurrent"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"layers_block_type": ["mamba", "mlp"]}, True),
        ({"conv_L_cache": 3}, True),
        ({"mamba_d_state": 16}, True),
        ({}, False),
    ],
)
def test_layers_with_a_state_from_token_to_token_are_known(keys: dict[str, Any], recurrent: bool) -> None:
    assert has_recurrent_layers(_config(**keys)) is recurrent


def test_states_of_other_arithmetic_are_other_states() -> None:
    """Of one verifier, with the same ids: short factors, long ones, and what 0.1.0 made at the very limit."""

    def fingerprint(longest: int, switches: dict[str, int]) -> str:
        spec = PipelineSpec.model_validate(
            {
                "name": "p",
                "verifier": {"model": "m"},
                "dataset": {"path": "d"},
                "generation": {"max_sequence_tokens": longest, "max_new_tokens": 8},
            }
        )
        verifier = Verifier("m", "c", 8, 8, 40, 1024, 0, 0, "X", length_switches=switches)
        return ids.hidden_states_identity(spec, verifier, "tokens").fingerprint

    plain = {fingerprint(n, {}) for n in (63, 64, 65)}
    assert len(plain) == 1
    below, at, beyond = (fingerprint(n, {"x": 64}) for n in (63, 64, 65))
    assert plain == {below} and len({below, at, beyond}) == 3
