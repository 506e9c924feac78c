"""Pipeline files: what is refused and how it is said."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_pipeline import config
from eagle3_pipeline.config import (
    PACKAGE_PIPELINES,
    NoiseSpec,
    PipelineSpec,
    Section,
    enabled_pipelines,
    expand,
    find_pipeline,
    load_pipeline,
    pipeline_files,
    project_home,
)
from eagle3_pipeline.errors import ConfigError

MINIMAL: dict[str, Any] = {"verifier": {"model": "m"}, "dataset": {"path": "*.jsonl"}}
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation  # type: ignore[misc]
    for name, field in PipelineSpec.model_fields.items()
    if name != "name"
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGLE3_HOME", "EAGLE3_PIPELINES", "EAGLE3_ENABLED"):
        monkeypatch.delenv(name, raising=False)


def _write(folder: Path, content: Any, name: str = "mine") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def edit(section: str, **keys: Any) -> dict[str, Any]:
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), **keys}}


def make_spec(content: dict[str, Any]) -> PipelineSpec:
    return PipelineSpec.model_validate({"name": "p", **content})


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_minimal_file_has_the_defaults_of_the_reference_run(tmp_path: Path) -> None:
    spec = load_pipeline(_write(tmp_path, MINIMAL))
    assert spec.name == "mine"
    training = spec.training
    assert (training.epochs, training.lr, training.scheduler, training.warmup_ratio) == (10, 3e-5, "cosine", 0.01)
    assert (training.ttt_steps, training.noise, training.validation_fraction) == (3, NoiseSpec(scale=0.05), 0.05)
    assert spec.vocab.draft_vocab_size == 32_000
    assert spec.draft.sliding_window is None, "full attention"
    assert spec.verifier.trust_remote_code is False


def _refused(tmp_path: Path, content: Any) -> str:
    path = _write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        load_pipeline(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_an_unknown_section_is_refused_with_the_sections_there_are(tmp_path: Path) -> None:
    message = _refused(tmp_path, {**MINIMAL, "trainig": {}})
    assert (
        "trainig: unknown key; allowed keys: verifier, dataset, generation, capture, vocab, draft, training, "
        "evaluation, publish, resources, schedule" in message
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (edit("verifier", modle="x"), "verifier.modle: unknown key; allowed keys: model, revision, dtype, "),
        (edit("training", noise={"std": 1}), "training.noise.std: unknown key; allowed keys: kind, scale"),
        ({**MINIMAL, "name": "other"}, "name: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_keys_there_are(tmp_path: Path, content: dict, expected: str) -> None:
    assert expected in _refused(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"verifier": {"model": "m"}}, "dataset: Field required"),
        (edit("training", epochs="many"), "training.epochs: Input should be a valid integer"),
        (edit("training", epochs="many"), "found 'many'"),
        (edit("training", epochs=0), "training.epochs: Input should be greater than or equal to 1; found 0"),
        (edit("training", lr=0), "training.lr: Input should be greater than 0; found 0"),
        (edit("training", lr=float("nan")), "training.lr: Input should be"),
        (
            edit("draft", rms_norm_eps=float("inf")),
            "draft.rms_norm_eps: Input should be a finite number; found inf",
        ),
        (edit("training", warmup_ratio=1), "training.warmup_ratio: Input should be less than 1; found 1"),
        (edit("training", optimizer="sgd"), "training.optimizer: Input should be 'adamw' or 'muon'; found 'sgd'"),
        (edit("generation", mode="copy"), "Input should be 'regenerate' or 'passthrough'; found 'copy'"),
        (edit("generation", top_p=1.5), "generation.top_p: Input should be less than or equal to 1; found 1.5"),
        (edit("capture", aux_layer_ids=[1, "x", 3]), "capture.aux_layer_ids.1: Input should be a valid integer"),
        (edit("draft", num_hidden_layers=2), "draft.num_hidden_layers: Input should be 1; found 2"),
        ({**MINIMAL, "training": 3}, "training: Input should be a valid dictionary"),
        ({**MINIMAL, "training": None}, "training: Input should be a valid dictionary"),
    ],
)
def test_wrong_values_name_key_found_and_allowed(tmp_path: Path, content: dict, expected: str) -> None:
    assert expected in _refused(tmp_path, content)


def test_all_problems_of_a_file_are_listed(tmp_path: Path) -> None:
    content = {**edit("training", epochs=0, lr=-1), "vocab": {"size": 3}}
    message = _refused(tmp_path, content)
    assert "3 problem(s)" in message
    assert all(key in message for key in ("training.epochs", "training.lr", "vocab.size"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (edit("generation", max_new_tokens=64, max_sequence_tokens=64), "max_new_tokens must be below"),
        (
            edit("training", batch_tokens=4095),
            "training.batch_tokens must be at least generation.max_sequence_tokens",
        ),
        (edit("schedule", timezone="Berlin"), "schedule.timezone: Value error, 'Berlin' is no time zone"),
        (edit("capture", aux_layer_ids=[1, 2]), "capture.aux_layer_ids must name three layers"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, content: dict, expected: str) -> None:
    assert expected in _refused(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "expected a mapping of sections, found NoneType"),
        ("- a\n- b\n", "expected a mapping of sections, found list"),
        ("a: [", "cannot be read as YAML"),
        ("!!python/object/apply:os.getcwd []", "cannot be read as YAML"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, content: str, expected: str) -> None:
    assert expected in _refused(tmp_path, content)


@pytest.mark.parametrize("name", ["1st", "With-Dash", "x" * 64])
def test_a_file_name_that_cannot_name_a_pipeline_is_refused(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path, MINIMAL, name)
    with pytest.raises(ConfigError, match="name: String should match pattern"):
        load_pipeline(path)


def test_a_section_cannot_be_changed_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make_spec(MINIMAL).training.epochs = 3


# --- variables and folders --------------------------------------------------------------------------------------------


def test_variables_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELS", "/models")
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path))
    assert expand("${MODELS}/a/${MODELS}") == "/models/a//models"
    assert expand("${EAGLE3_HOME}/x") == f"{tmp_path}/x"
    assert expand("no $MODELS {here}") == "no $MODELS {here}"


def test_a_variable_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET_ANYWHERE", raising=False)
    with pytest.raises(ConfigError, match=r"'a/\$\{NOT_SET_ANYWHERE\}' names .* NOT_SET_ANYWHERE, which is not set"):
        expand("a/${NOT_SET_ANYWHERE}")


def test_the_home_is_beside_the_checkout_unless_the_environment_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert project_home() == Path(config.__file__).parents[2] / ".eagle3"
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "h"))
    assert project_home() == tmp_path / "h"
    monkeypatch.setenv("EAGLE3_HOME", "~/h")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert project_home() == tmp_path / "h"


def test_only_the_demo_is_enabled_by_default() -> None:
    assert [spec.name for spec in enabled_pipelines()] == ["smollm2_demo"]
    assert {"smollm2_demo", "kimi_k25"} <= set(pipeline_files())


def test_pipelines_of_several_folders_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "a", MINIMAL, "one")
    _write(tmp_path / "b", edit("training", epochs=7), "two")
    _write(tmp_path / "b", edit("training", epochs=9), "one")
    monkeypatch.setenv("EAGLE3_PIPELINES", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    monkeypatch.setenv("EAGLE3_ENABLED", " two, one,two,")
    specs = enabled_pipelines()
    assert [(spec.name, spec.training.epochs) for spec in specs] == [("two", 7), ("one", 9)], "later folders win"
    assert find_pipeline("smollm2_demo").name == "smollm2_demo"


def test_a_broken_file_that_is_not_enabled_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "a", "a: [", "broken")
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path / "a"))
    assert [spec.name for spec in enabled_pipelines()] == ["smollm2_demo"]


def test_unknown_pipelines_and_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no pipeline is named 'nope'; there are: .*kimi_k25, .*smollm2_demo"):
        find_pipeline("nope")
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"EAGLE3_PIPELINES names .*gone, which is not a folder"):
        pipeline_files()


def test_the_reference_run_is_as_published() -> None:
    spec = load_pipeline(PACKAGE_PIPELINES / "kimi_k25.yaml")
    assert spec.capture.aux_layer_ids == [2, 30, 58]
    draft = spec.draft
    assert (draft.head_dim, draft.num_attention_heads, draft.intermediate_size) == (128, 64, 18432)
    assert (draft.rope_theta, draft.rms_norm_eps, draft.max_position_embeddings) == (1e6, 1e-6, 262144)
    assert (spec.resources.num_gpus, spec.resources.tensor_parallel_size) == (8, 8)
    assert (spec.verifier.trust_remote_code, spec.verifier.stop_tokens) == (True, ["<|im_end|>"])


@pytest.mark.parametrize(
    ("section", "value", "message"),
    [
        ("assumptions", {"samples": [0]}, "assumptions.samples.0"),
        ("assumptions", {"samples": []}, "assumptions.samples"),
        ("dataset", {"filters": {"min_chars": 10, "max_chars": 5}}, "max_chars 5 is below min_chars 10"),
        ("dataset", {"filters": {"languages": []}}, "an empty list of languages or sources allows nothing"),
        ("dataset", {"columns": {"prompt": ""}}, "dataset.columns.prompt"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(tmp_path: Path, section: str, value: dict, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump(edit(section, **value)))
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_pipeline(path)


def test_a_key_that_is_written_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("verifier: {model: m}\ndataset: {path: a}\ndataset: {path: b}\n")
    with pytest.raises(ConfigError, match="written twice: dataset"):
        load_pipeline(path)
