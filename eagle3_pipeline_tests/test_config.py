"""Pipeline files: what is refused and how it is said, which key makes which stage stale."""

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
from eagle3_pipeline.stages import identity as ids

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


def _with(section: str, **keys: Any) -> dict[str, Any]:
    return {**MINIMAL, section: {**MINIMAL.get(section, {}), **keys}}


def _spec(content: dict[str, Any]) -> PipelineSpec:
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
        (_with("verifier", modle="x"), "verifier.modle: unknown key; allowed keys: model, revision, dtype, "),
        (_with("training", noise={"std": 1}), "training.noise.std: unknown key; allowed keys: kind, scale"),
        ({**MINIMAL, "name": "other"}, "name: unknown key"),
    ],
)
def test_an_unknown_key_is_refused_with_the_keys_there_are(tmp_path: Path, content: dict, expected: str) -> None:
    assert expected in _refused(tmp_path, content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"verifier": {"model": "m"}}, "dataset: Field required"),
        (_with("training", epochs="many"), "training.epochs: Input should be a valid integer"),
        (_with("training", epochs="many"), "found 'many'"),
        (_with("training", epochs=0), "training.epochs: Input should be greater than or equal to 1; found 0"),
        (_with("training", lr=0), "training.lr: Input should be greater than 0; found 0"),
        (_with("training", lr=float("nan")), "training.lr: Input should be"),
        (_with("draft", rms_norm_eps=float("inf")), "draft.rms_norm_eps: Input should be a finite number; found inf"),
        (_with("training", warmup_ratio=1), "training.warmup_ratio: Input should be less than 1; found 1"),
        (_with("training", optimizer="sgd"), "training.optimizer: Input should be 'adamw' or 'muon'; found 'sgd'"),
        (_with("generation", mode="copy"), "Input should be 'regenerate' or 'passthrough'; found 'copy'"),
        (_with("generation", top_p=1.5), "generation.top_p: Input should be less than or equal to 1; found 1.5"),
        (_with("capture", aux_layer_ids=[1, "x", 3]), "capture.aux_layer_ids.1: Input should be a valid integer"),
        (_with("draft", num_hidden_layers=2), "draft.num_hidden_layers: Input should be 1; found 2"),
        ({**MINIMAL, "training": 3}, "training: Input should be a valid dictionary"),
        ({**MINIMAL, "training": None}, "training: Input should be a valid dictionary"),
    ],
)
def test_wrong_values_name_key_found_and_allowed(tmp_path: Path, content: dict, expected: str) -> None:
    assert expected in _refused(tmp_path, content)


def test_all_problems_of_a_file_are_listed(tmp_path: Path) -> None:
    content = {**_with("training", epochs=0, lr=-1), "vocab": {"size": 3}}
    message = _refused(tmp_path, content)
    assert "3 problem(s)" in message
    assert all(key in message for key in ("training.epochs", "training.lr", "vocab.size"))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (_with("generation", max_new_tokens=64, max_sequence_tokens=64), "max_new_tokens must be below"),
        (_with("training", batch_tokens=4095), "training.batch_tokens must be at least generation.max_sequence_tokens"),
        (_with("capture", aux_layer_ids=[1, 2]), "capture.aux_layer_ids must name three layers"),
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
        _spec(MINIMAL).training.epochs = 3


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
    assert project_home() == Path(config.__file__).parents[1] / ".eagle3"
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
    _write(tmp_path / "b", _with("training", epochs=7), "two")
    _write(tmp_path / "b", _with("training", epochs=9), "one")
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


# --- semantic, execution, locator -------------------------------------------------------------------------------------


def _sections() -> list[tuple[str, type[Section]]]:
    return [*SECTIONS.items(), ("training.noise", NoiseSpec)]


def test_every_key_is_described() -> None:
    for section, model in _sections():
        for key, field in model.model_fields.items():
            assert field.description and len(field.description) > 3, f"{section}.{key}"


# Keys that never enter a fingerprint; all others do.
EXECUTION = {
    "dataset": {"min_yield"},
    "generation": {"min_yield", "one_pass"},
    "capture": {"max_shard_bytes", "min_layer_variance", "min_next_token_agreement", "recapture_tolerance"},
    "vocab": {"min_coverage"},
    "training": {"device", "num_workers", "num_threads", "attention", "log_every_s"},
    "resources": set(SECTIONS["resources"].model_fields),
    "schedule": set(SECTIONS["schedule"].model_fields),
}
LOCATORS = {
    "verifier": {"model", "revision"},
    "dataset": {"source", "path", "subset", "split", "samples_per_chunk", "max_samples"},
    "evaluation": {"prompts"},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_semantic_keys_are_all_but_execution_keys_and_locators(section: str) -> None:
    spec = _spec(MINIMAL)
    expected = set(SECTIONS[section].model_fields) - EXECUTION.get(section, set()) - LOCATORS.get(section, set())
    assert set(getattr(spec, section).semantic()) == expected


BASE = _with("generation", mode="regenerate")
SG, HS, BASELINE, CHECKPOINT = ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES, ids.BASELINE, ids.DRAFT_CHECKPOINT
# What a change of one semantic key makes stale, if nothing upstream changes: by hand, from what each stage does.
STALE: list[tuple[str, str, Any, set[str]]] = [
    ("verifier", "dtype", "float32", {SG, HS, BASELINE}),
    ("verifier", "trust_remote_code", True, {SG, BASELINE}),
    ("verifier", "chat_template", "{{ x }}", {SG, BASELINE}),
    ("verifier", "stop_tokens", ["<e>"], {SG, BASELINE}),
    ("dataset", "format", "messages", {ids.DATASET}),
    ("dataset", "max_row_bytes", 999, {ids.DATASET}),
    ("generation", "mode", "passthrough", {SG}),
    ("generation", "temperature", 0.7, {SG}),
    ("generation", "top_p", 0.9, {SG}),
    ("generation", "top_k", 40, {SG}),
    ("generation", "max_new_tokens", 512, {SG}),
    ("generation", "max_sequence_tokens", 2048, {SG}),
    ("generation", "truncated", "drop", {SG}),
    ("generation", "chat_template_kwargs", {"thinking": False}, {SG, BASELINE}),
    ("capture", "aux_layer_ids", [1, 2, 3], {HS, BASELINE}),
    ("vocab", "draft_vocab_size", 100, {ids.VOCAB_MAP}),
    ("draft", "intermediate_size", 64, {CHECKPOINT}),
    ("draft", "num_attention_heads", 2, {CHECKPOINT}),
    ("draft", "num_key_value_heads", 2, {CHECKPOINT}),
    ("draft", "head_dim", 64, {CHECKPOINT}),
    ("draft", "rope_theta", 1e4, {CHECKPOINT}),
    ("draft", "rms_norm_eps", 1e-5, {CHECKPOINT}),
    ("draft", "max_position_embeddings", 99, {CHECKPOINT}),
    ("draft", "sliding_window", 128, {CHECKPOINT}),
    ("draft", "norm_before_residual", False, {CHECKPOINT}),
    ("draft", "norm_before_fc", True, {CHECKPOINT}),
    ("training", "epochs", 3, {CHECKPOINT}),
    ("training", "lr", 1e-4, {CHECKPOINT}),
    ("training", "optimizer", "muon", {CHECKPOINT}),
    ("training", "weight_decay", 0.1, {CHECKPOINT}),
    ("training", "scheduler", "linear", {CHECKPOINT}),
    ("training", "warmup_ratio", 0.1, {CHECKPOINT}),
    ("training", "max_grad_norm", 0.5, {CHECKPOINT}),
    ("training", "accumulate", 2, {CHECKPOINT}),
    ("training", "batch_tokens", 16384, {CHECKPOINT}),
    ("training", "ttt_steps", 4, {CHECKPOINT}),
    ("training", "ttt_loss_decay", 0.8, {CHECKPOINT}),
    ("training", "noise", {"kind": "uniform"}, {CHECKPOINT}),
    ("training", "train_lm_head", False, {CHECKPOINT}),
    ("training", "validation_fraction", 0.2, {CHECKPOINT}),
    ("training", "min_validation_samples", 2, {CHECKPOINT}),
    ("training", "patience", 2, {CHECKPOINT}),
    ("training", "seed", 1, {CHECKPOINT}),
    ("evaluation", "num_speculative_tokens", 5, {ids.DRAFT_EVALUATION}),
    ("evaluation", "max_new_tokens", 32, {BASELINE, ids.DRAFT_EVALUATION}),
    ("evaluation", "batch_size", 4, {BASELINE, ids.DRAFT_EVALUATION}),
    ("evaluation", "near_tie_epsilon", 0.01, {ids.DRAFT_EVALUATION}),
    ("publish", "min_improvement", 0.1, {ids.PUBLISHED_DRAFT}),
]
# Values that differ from every default, for keys that must not matter.
IRRELEVANT: list[tuple[str, str, Any]] = [
    ("verifier", "model", "other"),
    ("verifier", "revision", "main"),
    ("dataset", "source", "huggingface"),
    ("dataset", "path", "other"),
    ("dataset", "subset", "s"),
    ("dataset", "split", "test"),
    ("dataset", "samples_per_chunk", 3),
    ("dataset", "max_samples", 3),
    ("dataset", "min_yield", 0.1),
    ("generation", "min_yield", 0.1),
    ("generation", "one_pass", "never"),
    ("capture", "max_shard_bytes", 2**20),
    ("capture", "min_layer_variance", 0.1),
    ("capture", "min_next_token_agreement", 0.5),
    ("capture", "recapture_tolerance", 0.5),
    ("vocab", "min_coverage", 0.1),
    ("training", "device", "cpu"),
    ("training", "num_workers", 3),
    ("training", "num_threads", 3),
    ("training", "attention", "eager"),
    ("training", "log_every_s", 1.0),
    ("evaluation", "prompts", "other.jsonl"),
    ("resources", "num_gpus", 3),
    ("resources", "tensor_parallel_size", 2),
    ("resources", "gpu_memory_utilization", 0.5),
    ("resources", "cpu_kvcache_gib", 2.0),
    ("resources", "max_num_batched_tokens", 99),
    ("resources", "max_num_seqs", 99),
    ("resources", "enforce_eager", True),
    ("resources", "dummy_load", True),
    ("resources", "idle_timeout_s", 9.0),
    ("resources", "start_timeout_s", 9.0),
    ("resources", "lease_timeout_s", 9.0),
    ("schedule", "cron", "0 4 * * *"),
    ("schedule", "timezone", "Europe/Berlin"),
    ("schedule", "min_new_fraction", 0.1),
    ("schedule", "min_fresh_fraction", 0.5),
]


def _fingerprints(content: dict[str, Any]) -> dict[str, str]:
    spec = _spec(content)
    return {stage: ids.identify(spec, stage, {}).fingerprint for stage in ids.FORMAT_VERSIONS}


def _changed(section: str, key: str, value: Any) -> set[str]:
    before, after = _fingerprints(MINIMAL), _fingerprints(_with(section, **{key: value}))
    return {stage for stage in before if before[stage] != after[stage]}


@pytest.mark.parametrize(("section", "key", "value", "expected"), STALE, ids=[f"{s}.{k}" for s, k, *_ in STALE])
def test_a_semantic_key_makes_exactly_these_stages_stale(section: str, key: str, value: Any, expected: set) -> None:
    assert _changed(section, key, value) == expected
    assert _spec(_with(section, **{key: value})).spec_hash() != _spec(MINIMAL).spec_hash()


@pytest.mark.parametrize(("section", "key", "value"), IRRELEVANT, ids=[f"{s}.{k}" for s, k, _ in IRRELEVANT])
def test_execution_keys_and_locators_make_nothing_stale(section: str, key: str, value: Any) -> None:
    assert getattr(getattr(_spec(_with(section, **{key: value})), section), key) != getattr(
        getattr(_spec(MINIMAL), section), key
    )
    assert _changed(section, key, value) == set()
    assert _spec(_with(section, **{key: value})).spec_hash() == _spec(MINIMAL).spec_hash()


def test_the_tables_above_hold_every_key() -> None:
    keys = {(s, k) for s, k, *_ in STALE} | {(s, k) for s, k, _ in IRRELEVANT}
    fixed = {("capture", "dtype"), ("draft", "num_hidden_layers")}  # one allowed value
    assert keys | fixed == {(s, k) for s, model in SECTIONS.items() for k in model.model_fields}


@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k", "max_new_tokens", "truncated"])
def test_sampling_does_not_matter_where_nothing_is_sampled(key: str) -> None:
    value = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "max_new_tokens": 5, "truncated": "drop"}[key]
    assert _fingerprints(_with("generation", mode="passthrough", **{key: value})) == _fingerprints(
        _with("generation", mode="passthrough")
    )


def test_the_name_of_a_pipeline_is_no_part_of_any_fingerprint() -> None:
    one, two = (PipelineSpec.model_validate({**MINIMAL, "name": name}) for name in ("one", "two"))
    assert one.spec_hash() == two.spec_hash()
    assert all(ids.identify(one, s, {}) == ids.identify(two, s, {}) for s in ids.FORMAT_VERSIONS)
