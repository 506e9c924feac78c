"""What release 0.1.0 stored stays fresh: literal fingerprints, code versions and work ids, and a store that it wrote.

A stage whose results changed has a raised format version; `RAISED` names it, and CHANGELOG says whose results change.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.config import PipelineSpec, load_pipeline
from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.data.seen_sources import read_otherwise
from eagle3_pipeline.data.verifier import resolve_verifier
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_checkpoint import materialise_checkpoint
from eagle3_pipeline_tests import fixtures

# Format versions of 0.1.0.
VERSIONS = {
    ids.VERIFIER: 1,
    ids.DATASET: 1,
    ids.SYNTHETIC_GENERATIONS: 1,
    ids.HIDDEN_STATES: 1,
    ids.VOCAB_MAP: 1,
    ids.BASELINE: 2,
    ids.DRAFT_CHECKPOINT: 1,
    ids.DRAFT_EVALUATION: 2,
    ids.PUBLISHED_DRAFT: 1,
}
RAISED: set[str] = set()
GOLDEN: dict[str, Any] = json.loads((Path(fixtures.__file__).parent / "golden_0_1_0.json").read_text())
BASE: dict[str, dict[str, Any]] = {"verifier": {"model": "./model"}, "dataset": {"path": "data/*.jsonl"}}
FILES: dict[str, dict[str, dict[str, Any]]] = {
    "defaults": {},
    "sampled": {
        "verifier": {"dtype": "float32", "stop_tokens": ["<|im_end|>"]},
        "generation": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "max_new_tokens": 64, "truncated": "drop"},
    },
    "passthrough": {
        "dataset": {
            "format": "messages",
            "columns": {"messages": "turns"},
            "filters": {"min_chars": 3},
            "decontaminate": False,
        },
        "generation": {"mode": "passthrough", "chat_template_kwargs": {"thinking": False}},
    },
    "layers": {
        "capture": {"aux_layer_ids": [5, 1, 3]},
        "training": {"epochs": 3, "optimizer": "muon", "noise": {"kind": "uniform", "scale": 0.1}},
        "draft": {"head_dim": 16, "norm_before_fc": True},
    },
    "measured": {
        "vocab": {"draft_vocab_size": 64},
        "evaluation": {"num_speculative_tokens": 5, "other_batch_sizes": [4]},
        "publish": {"min_improvement": 0.1},
    },
}
CHUNK = Chunk("000000", "data/a.jsonl", 0, 4, 0, "c" * 32, (2,))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = fixtures.unpack_store("0_1_0", tmp_path / "stored")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("EAGLE3_HOME", str(folder / "home"))
    yield folder


def _context(folder: Path) -> StageContext:
    return StageContext(load_pipeline(folder / "pipelines" / "p.yaml"), lambda _: None, folder / "home")


def test_raised_versions_are_listed() -> None:
    assert {stage for stage, version in ids.FORMAT_VERSIONS.items() if version != VERSIONS.get(stage)} == RAISED


@pytest.mark.parametrize("name", FILES)
def test_fingerprints_code_versions_and_spec_hashes(stored: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(ids, "FORMAT_VERSIONS", VERSIONS)
    content = {key: {**BASE.get(key, {}), **FILES[name].get(key, {})} for key in {*BASE, *FILES[name]}}
    spec = PipelineSpec(name="p", **content)  # type: ignore[arg-type]
    verifier = resolve_verifier(spec.verifier)
    identities = [
        ids.verifier_identity(spec, verifier),
        ids.dataset_identity(spec, CHUNK, "looked-for"),
        ids.generations_identity(spec, verifier, "dataset"),
        ids.hidden_states_identity(spec, verifier, "tokens"),
        ids.vocab_identity(spec, verifier, {"000000": "counts"}),
        ids.baseline_identity(spec, verifier, b"prompts"),
        ids.checkpoint_identity(spec, verifier, "vocab", {"000000": "sequences"}, {"000000": "states"}),
        ids.evaluation_identity(spec, "checkpoint", "baseline"),
    ]
    assert {one.stage: one.fingerprint for one in identities} == GOLDEN[name]["fingerprints"]
    assert {stage: ids.code_version(spec, stage) for stage in VERSIONS} == GOLDEN[name]["code_versions"]
    assert spec.spec_hash() == GOLDEN[name]["spec_hash"]


def test_work_ids_and_fingerprints_of_a_stored_pipeline(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "FORMAT_VERSIONS", VERSIONS)
    found = plan(_context(stored))
    assert found.work_ids == GOLDEN["stored"]["work_ids"]
    assert {f"{row.stage} {row.chunk}".strip(): row.fingerprint for row in found.rows} == GOLDEN["stored"][
        "fingerprints"
    ]
    assert found.todo == []


def test_a_store_of_0_1_0_is_fresh_but_for_raised_stages_and_what_follows_them(stored: Path) -> None:
    context = _context(stored)
    assert {row.stage for row in plan(context).todo} <= RAISED | {ids.DRAFT_EVALUATION, ids.PUBLISHED_DRAFT}
    assert not read_otherwise(stored / "home/store/pipelines/p/seen_sources.parquet", context.spec.dataset)


@pytest.mark.slow
def test_a_store_of_0_1_0_is_trained_on(stored: Path) -> None:
    """Its sequences, states and vocabulary are what training reads; a new seed is a new checkpoint of them."""
    context = _context(stored)
    before = plan(context)
    file = stored / "pipelines" / "p.yaml"
    file.write_text(file.read_text().replace("training: {", "training: {seed: 1, "))
    made = materialise_checkpoint(_context(stored))
    assert made.recomputed
    assert made.manifest.metrics["sequences_train"] + made.manifest.metrics["sequences_val"] == 9
    assert plan(context).rows[:10] == before.rows[:10]
