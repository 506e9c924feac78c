"""Which key makes which stage stale: every key is semantic, execution or locator, and the tables hold them all."""

from typing import Any

import pytest

from eagle3_pipeline.config import ColumnsSpec, FiltersSpec, NoiseSpec, PipelineSpec, Section
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline_tests.test_config import MINIMAL, SECTIONS, edit, make_spec


def _sections() -> list[tuple[str, type[Section]]]:
    nested: list[tuple[str, type[Section]]] = [
        ("training.noise", NoiseSpec),
        ("dataset.columns", ColumnsSpec),
        ("dataset.filters", FiltersSpec),
    ]
    return [*SECTIONS.items(), *nested]


def test_every_key_is_described() -> None:
    for section, model in _sections():
        for key, field in model.model_fields.items():
            assert field.description and len(field.description) > 3, f"{section}.{key}"


# Keys that never enter a fingerprint; all others do.
EXECUTION = {
    "dataset": {"min_yield"},
    "generation": {"min_yield", "one_pass"},
    "capture": {
        "max_shard_bytes",
        "min_layer_variance",
        "min_next_token_agreement",
        "recapture_tolerance",
        "max_teacher_kl",
    },
    "vocab": {"min_coverage"},
    "evaluation": {"simulation_tolerance"},
    "training": {"device", "num_processes", "num_workers", "num_threads", "attention", "log_every_s"},
    "resources": set(SECTIONS["resources"].model_fields),
    "schedule": set(SECTIONS["schedule"].model_fields),
    "assumptions": set(SECTIONS["assumptions"].model_fields),
}
# Keys that earlier releases did not have: at their default they enter no fingerprint.
LATER = {
    "verifier": {"reasoning_marks"},
    "dataset": {"reasoning"},
    "generation": {"template_date"},
}
LOCATORS = {
    "verifier": {"model", "revision"},
    "dataset": {"source", "path", "subset", "split", "samples_per_chunk", "max_samples"},
    "training": {"warm_start"},
    "evaluation": {"prompts"},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_semantic_keys_are_all_but_execution_keys_and_locators(section: str) -> None:
    spec = make_spec(MINIMAL)
    expected = set(SECTIONS[section].model_fields) - EXECUTION.get(section, set()) - LOCATORS.get(section, set())
    assert set(getattr(spec, section).semantic()) == expected - LATER.get(section, set())


BASE = edit("generation", mode="regenerate")
SG, HS, BASELINE, CHECKPOINT = ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES, ids.BASELINE, ids.DRAFT_CHECKPOINT
# What a change of one semantic key makes stale, if nothing upstream changes: by hand, from what each stage does.
STALE: list[tuple[str, str, Any, set[str]]] = [
    ("verifier", "dtype", "float32", {SG, HS, BASELINE}),
    ("verifier", "trust_remote_code", True, {SG, BASELINE}),
    ("verifier", "chat_template", "{{ x }}", {SG, BASELINE}),
    ("verifier", "stop_tokens", ["<e>"], {SG, BASELINE}),
    ("verifier", "reasoning_marks", ["<r>", "</r>"], {SG, BASELINE}),
    ("dataset", "format", "messages", {ids.DATASET}),
    ("dataset", "max_row_bytes", 999, {ids.DATASET}),
    ("dataset", "columns", {"prompt": "question"}, {ids.DATASET}),
    ("dataset", "tool_turns", "text", {ids.DATASET}),
    ("dataset", "filters", {"languages": ["en"]}, {ids.DATASET}),
    ("dataset", "decontaminate", False, {ids.DATASET}),
    ("dataset", "reasoning", "drop", {ids.DATASET}),
    ("generation", "mode", "passthrough", {SG}),
    ("generation", "temperature", 0.7, {SG}),
    ("generation", "top_p", 0.9, {SG}),
    ("generation", "top_k", 40, {SG}),
    ("generation", "max_new_tokens", 512, {SG}),
    ("generation", "max_sequence_tokens", 2048, {SG}),
    ("generation", "truncated", "drop", {SG}),
    ("generation", "chat_template_kwargs", {"thinking": False}, {SG, BASELINE}),
    ("generation", "template_date", "2025-02-03", {SG, BASELINE}),
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
    ("evaluation", "other_batch_sizes", [2], {BASELINE, ids.DRAFT_EVALUATION}),
    ("evaluation", "near_tie_epsilon", 0.01, {ids.DRAFT_EVALUATION}),
    ("publish", "min_improvement", 0.1, {ids.PUBLISHED_DRAFT}),
    ("publish", "max_category_drop", 0.1, {ids.PUBLISHED_DRAFT}),
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
    ("capture", "max_teacher_kl", 0.5),
    ("vocab", "min_coverage", 0.1),
    ("training", "device", "cpu"),
    ("training", "warm_start", "champion"),
    ("evaluation", "simulation_tolerance", 0.5),
    ("training", "num_workers", 3),
    ("training", "num_processes", 3),
    ("training", "num_threads", 3),
    ("training", "attention", "eager"),
    ("training", "log_every_s", 1.0),
    ("evaluation", "prompts", "other.jsonl"),
    ("resources", "num_gpus", 3),
    ("resources", "tensor_parallel_size", 2),
    ("resources", "max_engines", 4),
    ("resources", "gpu_memory_utilization", 0.5),
    ("resources", "cpu_kvcache_gib", 2.0),
    ("resources", "gpu_kvcache_gib", 2.0),
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
    ("assumptions", "hidden_size", 99),
    ("assumptions", "prompt_tokens_per_sample", 99),
    ("assumptions", "samples", [99]),
    ("assumptions", "load_s", 9.0),
    ("assumptions", "generation_tokens_per_s", 9.0),
    ("assumptions", "capture_tokens_per_s", 9.0),
    ("assumptions", "training_tokens_per_s", 9.0),
]


def _fingerprints(content: dict[str, Any]) -> dict[str, str]:
    spec = make_spec(content)
    return {stage: ids.identify(spec, stage, {}).fingerprint for stage in ids.FORMAT_VERSIONS}


def _changed(section: str, key: str, value: Any) -> set[str]:
    before, after = _fingerprints(MINIMAL), _fingerprints(edit(section, **{key: value}))
    return {stage for stage in before if before[stage] != after[stage]}


@pytest.mark.parametrize(("section", "key", "value", "expected"), STALE, ids=[f"{s}.{k}" for s, k, *_ in STALE])
def test_a_semantic_key_makes_exactly_these_stages_stale(section: str, key: str, value: Any, expected: set) -> None:
    assert _changed(section, key, value) == expected
    assert make_spec(edit(section, **{key: value})).spec_hash() != make_spec(MINIMAL).spec_hash()


@pytest.mark.parametrize(("section", "key", "value"), IRRELEVANT, ids=[f"{s}.{k}" for s, k, _ in IRRELEVANT])
def test_execution_keys_and_locators_make_nothing_stale(section: str, key: str, value: Any) -> None:
    assert getattr(getattr(make_spec(edit(section, **{key: value})), section), key) != getattr(
        getattr(make_spec(MINIMAL), section), key
    )
    assert _changed(section, key, value) == set()
    assert make_spec(edit(section, **{key: value})).spec_hash() == make_spec(MINIMAL).spec_hash()


def test_the_tables_above_hold_every_key() -> None:
    keys = {(s, k) for s, k, *_ in STALE} | {(s, k) for s, k, _ in IRRELEVANT}
    fixed = {("capture", "dtype"), ("draft", "num_hidden_layers")}  # one allowed value
    assert keys | fixed == {(s, k) for s, model in SECTIONS.items() for k in model.model_fields}


@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k", "max_new_tokens", "truncated"])
def test_sampling_does_not_matter_where_nothing_is_sampled(key: str) -> None:
    value = {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "max_new_tokens": 5, "truncated": "drop"}[key]
    assert _fingerprints(edit("generation", mode="passthrough", **{key: value})) == _fingerprints(
        edit("generation", mode="passthrough")
    )


def test_the_name_of_a_pipeline_is_no_part_of_any_fingerprint() -> None:
    one, two = (PipelineSpec.model_validate({**MINIMAL, "name": name}) for name in ("one", "two"))
    assert one.spec_hash() == two.spec_hash()
    assert all(ids.identify(one, s, {}) == ids.identify(two, s, {}) for s in ids.FORMAT_VERSIONS)
