"""Vocabulary to champion on the fake engine, with real training: what the UI shows, warm starts, promotion."""

from typing import Any

import dagster as dg
import pytest

from eagle3_pipeline.assets import launch
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import read_champion
from eagle3_pipeline_tests.assets.conftest import Pipeline
from eagle3_pipeline_tests.assets.test_graph import metadata

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL: dict[str, Any] = {"epochs": 1, "batch_tokens": 96, "min_validation_samples": 1}


@pytest.fixture
def small(pipeline: Pipeline) -> Pipeline:
    """Two prompts to evaluate, one epoch."""
    rows = ['{"category": "a", "prompt": "hi"}', '{"category": "b", "prompt": "you"}']
    (pipeline.home / "prompts.jsonl").write_text("\n".join(rows))
    configure(pipeline)
    return pipeline


def configure(pipeline: Pipeline, **training: Any) -> None:
    evaluation = {"prompts": "${EAGLE3_HOME}/prompts.jsonl", "max_new_tokens": 8, "other_batch_sizes": [2]}
    pipeline.configure(training={**SMALL, **training}, evaluation=evaluation)


def materialise(pipeline: Pipeline) -> list[str]:
    lines: list[str] = []
    runner = launch.InProcess(build_definitions([pipeline.spec]), pipeline.instance, lines.append)
    launch.materialise_stale(pipeline.spec, runner, lines.append)
    return lines


def evaluate(pipeline: Pipeline, *stages: str) -> dg.ExecuteInProcessResult:
    """Runs stages that are fresh already: their metadata and checks come again."""
    result = pipeline.run("train_and_evaluate", None, *stages)
    assert result.success
    return result


def test_what_people_see_of_a_draft(small: Pipeline) -> None:
    materialise(small)
    assert plan(small.context).todo == []
    result = evaluate(small, ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION, ids.PUBLISHED_DRAFT)
    checks = {e.asset_check_key.name: e for e in result.get_asset_check_evaluations()}
    assert checks["up_to_date"].passed and checks["loads_in_vllm"].passed
    # The fake engine accepts by counting, not by what the draft says: served and simulated cannot agree.
    agreement = checks["served_agrees_with_simulated"]
    assert not agreement.passed and agreement.metadata["served"].value == 1.0
    seen = metadata(result, ids.DRAFT_CHECKPOINT)
    assert "data:image/png;base64" in seen["curves"]
    report = metadata(result, ids.DRAFT_EVALUATION)["report"]
    assert "| prompts at once" in report and "Little data: " in report
    card = metadata(result, ids.PUBLISHED_DRAFT)["model_card"]
    assert card.startswith("---\nbase_model: ") and "![Training curves](curves.png)" in card


def test_a_warm_start_is_provenance_and_changes_no_fingerprint(small: Pipeline) -> None:
    materialise(small)
    champion = read_champion(small.context.references.folder)
    assert champion
    configure(small, warm_start="champion")
    assert plan(small.context).todo == []
    configure(small, warm_start="champion", epochs=2)
    materialise(small)
    made = small.context.upstream(ids.DRAFT_CHECKPOINT).manifest
    assert made.provenance == {"warm_start": champion.draft.checkpoint}
    configure(small, warm_start=str(small.home / "nowhere"), epochs=3)
    with pytest.raises(Exception, match=r"training\.warm_start: .*nowhere has no model\.safetensors"):
        materialise(small)


def test_several_processes_train_through_the_asset(small: Pipeline) -> None:
    configure(small, num_processes=2, accumulate=2)
    materialise(small)
    assert plan(small.context).todo == []
    assert small.context.upstream(ids.DRAFT_CHECKPOINT).manifest.metrics["steps"] >= 1
