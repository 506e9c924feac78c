"""One key of every stage, edited: `eagle3 plan --why` names it, and nothing upstream of it is stale."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from eagle3_pipeline.cli import main
from eagle3_pipeline.planning import Plan, new_data_fraction, plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.planning.conftest import ContextMaker, fill, write_source

# A key of each stage's section, another value, and what the reason says.
SEMANTIC: list[tuple[str, dict[str, Any], str]] = [
    (ids.DATASET, {"dataset": {"max_row_bytes": 99999}}, "dataset.max_row_bytes 16777216 -> 99999"),
    (ids.SYNTHETIC_GENERATIONS, {"generation": {"temperature": 0.5}}, "generation.temperature 0.0 -> 0.5"),
    (ids.HIDDEN_STATES, {"capture": {"aux_layer_ids": [1, 2, 3]}}, "capture.aux_layer_ids none -> [1, 2, 3]"),
    (ids.VOCAB_MAP, {"vocab": {"draft_vocab_size": 20}}, "vocab.draft_vocab_size 32000 -> 20"),
    (ids.BASELINE, {"evaluation": {"max_new_tokens": 7}}, "evaluation.max_new_tokens 64 -> 7"),
    (ids.DRAFT_CHECKPOINT, {"training": {"epochs": 3}}, "training.epochs 10 -> 3"),
    (ids.DRAFT_EVALUATION, {"evaluation": {"num_speculative_tokens": 5}}, "evaluation.num_speculative_tokens 3 -> 5"),
]
EXECUTION: list[dict[str, Any]] = [
    {"dataset": {"min_yield": 0.1}},
    {"generation": {"one_pass": "never"}},
    {"capture": {"max_shard_bytes": 99999}},
    {"vocab": {"min_coverage": 0.1}},
    {"training": {"num_workers": 2}},
    {"resources": {"max_num_seqs": 3}},
    {"schedule": {"cron": "0 1 * * *", "min_fresh_fraction": 0.5}},
]
_UPSTREAM = {
    ids.DATASET: (),
    ids.SYNTHETIC_GENERATIONS: (ids.DATASET,),
    ids.HIDDEN_STATES: (ids.DATASET, ids.SYNTHETIC_GENERATIONS),
    ids.VOCAB_MAP: (ids.DATASET, ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES),
    ids.BASELINE: (),
    ids.DRAFT_CHECKPOINT: (ids.DATASET, ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES, ids.VOCAB_MAP),
    ids.DRAFT_EVALUATION: (*ids.CHUNK_STAGES, ids.VOCAB_MAP, ids.DRAFT_CHECKPOINT, ids.BASELINE),
}


@pytest.fixture
def filled(make_context: ContextMaker) -> StageContext:
    context = make_context()
    fill(context)
    return context


def _stale(found: Plan) -> set[str]:
    return {row.stage for row in found.todo}


@pytest.mark.parametrize(("stage", "sections", "reason"), SEMANTIC, ids=[stage for stage, *_ in SEMANTIC])
def test_a_semantic_key_is_named_and_nothing_upstream_is_stale(
    filled: StageContext,
    make_context: ContextMaker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stage: str,
    sections: dict[str, Any],
    reason: str,
) -> None:
    edited = make_context(**sections)
    found = plan(edited)
    assert stage in _stale(found)
    assert not {ids.VERIFIER, *_UPSTREAM[stage]} & _stale(found)
    output = _why(edited, monkeypatch, tmp_path, "000001")
    (line,) = [line for line in output.splitlines() if line.startswith(stage)]
    assert " stale " in line and reason in line


@pytest.mark.parametrize("sections", EXECUTION, ids=[next(iter(sections)) for sections in EXECUTION])
def test_an_execution_key_makes_nothing_stale(
    filled: StageContext, make_context: ContextMaker, sections: dict[str, Any]
) -> None:
    assert plan(make_context(**sections)).todo == []


@pytest.mark.parametrize("layer_ids", [[2, 6, 9], [9, 2, 6]])
def test_layer_ids_that_are_written_out_are_what_null_means(
    filled: StageContext, make_context: ContextMaker, source: Path, layer_ids: list[int]
) -> None:
    """Of 12 layers: 2, 12 // 2, 12 - 3. What either spelling made is the other's, and data alone is new."""
    written = make_context(capture={"aux_layer_ids": layer_ids})
    assert plan(written).todo == []
    write_source(source, "c", ["c0"])
    written.registry.sync(written.spec)
    # One row more than five.
    assert new_data_fraction(written, plan(written)) == 1 / 6
    fill(written)
    assert plan(make_context()).todo == []


def test_artifacts_of_null_and_of_other_layers_keep_their_fingerprints(make_context: ContextMaker) -> None:
    for capture, raw in (
        ({}, None),
        ({"aux_layer_ids": [3, 1, 2]}, [1, 2, 3]),
        ({"aux_layer_ids": [1, 2, 3]}, [1, 2, 3]),
    ):
        context = make_context(capture=capture)
        layers = [*sorted(raw or [2, 6, 9]), 12]
        found = ids.hidden_states_identity(context.spec, context.verifier, "tokens").fingerprint
        document = {
            "stage": "hidden_states",
            "format": 1,
            "spec": {"dtype": "auto", "capture": {"aux_layer_ids": raw, "dtype": "bfloat16"}},
            "inputs": {"verifier": context.verifier.content_id, "layer_ids": layers, "input_ids": "tokens"},
        }
        text = json.dumps(document, sort_keys=True, separators=(",", ":"))
        assert found == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_a_chunk_that_does_not_exist_is_an_error_that_names_the_first_and_the_last(
    filled: StageContext, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert "no chunk '7'; the chunks are 000000 to 000002" in _why(filled, monkeypatch, tmp_path, "7")


def _why(context: StageContext, monkeypatch: pytest.MonkeyPatch, folder: Path, chunk: str) -> str:
    (folder / "yaml").mkdir()
    content = context.spec.model_dump(mode="json", exclude={"name"})
    (folder / "yaml" / "p.yaml").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("EAGLE3_PIPELINES", str(folder / "yaml"))
    monkeypatch.setenv("EAGLE3_HOME", str(context.home))
    return CliRunner().invoke(main, ["plan", "p", "--why", chunk]).output
