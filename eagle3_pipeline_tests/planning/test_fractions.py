"""Chunks that are left out, new data, and what the rest will cost."""

from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.planning import new_data_fraction, plan
from eagle3_pipeline.planning.costs import Costs
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Produced, StageContext
from eagle3_pipeline.stages.current import current_chunks
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline_tests.planning.conftest import ContextMaker, fill, write_source


@pytest.fixture
def filled(make_context: ContextMaker) -> StageContext:
    context = make_context()
    fill(context)
    return context


def _rows(found: Any) -> dict[str, tuple[str, str]]:
    return {row.stage: (row.status.value, row.reason) for row in found.todo if not row.chunk}


def test_enough_fresh_chunks_are_enough_and_the_others_are_named(
    filled: StageContext, make_context: ContextMaker, source: Path
) -> None:
    write_source(source, "c", ["c0"])
    filled.registry.sync(filled.spec)
    assert plan(filled).left_out == ()
    assert plan(make_context(schedule={"min_fresh_fraction": 0.76})).left_out == ()
    # Three of four chunks are fresh, and the draft was trained on just these three.
    lenient = make_context(schedule={"min_fresh_fraction": 0.75})
    found = plan(lenient)
    assert found.left_out == ("000003",)
    assert _rows(found) == {}
    assert set(current_chunks(lenient).hidden_states) == {"000000", "000001", "000002"}


def test_new_rows_are_counted_against_all(filled: StageContext, source: Path, make_context: ContextMaker) -> None:
    assert new_data_fraction(filled, plan(filled)) is None
    write_source(source, "c", ["c0", "c1", "c2"])
    filled.registry.sync(filled.spec)
    # Five rows before, three new ones.
    assert new_data_fraction(filled, plan(filled)) == 3 / 8
    # A changed chunk of two rows is new data, too.
    write_source(source, "a", ["a0", "a1", "a2", "changed"])
    filled.registry.sync(filled.spec)
    assert new_data_fraction(filled, plan(filled)) == 5 / 8
    # Once they are materialised, the draft still has not seen them.
    fresh = make_context()
    for key in ("000001", "000003", "000004"):
        materialise_dataset(fresh, key)
    assert new_data_fraction(fresh, plan(fresh)) == 5 / 8


@pytest.mark.parametrize(
    "sections", [{"training": {"epochs": 3}}, {"vocab": {"draft_vocab_size": 9}}, {"evaluation": {"batch_size": 2}}]
)
def test_a_changed_setting_is_never_too_little_new_data(
    filled: StageContext, make_context: ContextMaker, source: Path, sections: dict[str, Any]
) -> None:
    write_source(source, "c", ["c0"])
    filled.registry.sync(filled.spec)
    changed = make_context(**sections)
    assert new_data_fraction(changed, plan(changed)) is None


def test_a_file_that_is_gone_is_never_too_little_new_data(filled: StageContext, source: Path) -> None:
    (source / "b.jsonl").unlink()
    write_source(source, "c", ["c0"])
    filled.registry.sync(filled.spec)
    assert new_data_fraction(filled, plan(filled)) is None


def test_costs_follow_from_what_was_measured(make_context: ContextMaker, source: Path) -> None:
    """Chunk 000000 (2 rows): 300 tokens, generated in 30 s, captured in 3 s. Three rows are left: 450 tokens."""
    context = make_context()
    context.registry.sync(context.spec)
    content = materialise_dataset(context, "000000").manifest.content_id
    made = ids.generations_identity(context.spec, context.verifier, content)
    metrics = {"num_tokens": 300.0, "engine_s": 30.0}
    produced = Produced("c", metrics, content_ids={"input_ids": "i", "token_counts": "t"})
    context.materialise(made, "000000", lambda _writer: produced)
    states = ids.hidden_states_identity(context.spec, context.verifier, "i")
    captured = Produced("s", {"num_tokens": 300.0, "engine_s": 3.0})
    context.materialise(states, "000000", lambda _writer: captured)
    estimates = plan(context).estimates
    generations, hidden = estimates[ids.SYNTHETIC_GENERATIONS], estimates[ids.HIDDEN_STATES]
    assert (generations.num_tokens, generations.at_most) == (450, False)
    assert generations.device_minutes == pytest.approx(45 / 60)
    # Four layers of eight bf16 values.
    assert hidden.num_bytes == 450 * 4 * 8 * 2
    assert hidden.device_minutes == pytest.approx(4.5 / 60)


def test_minutes_are_times_the_gpus_of_an_engine(make_context: ContextMaker) -> None:
    context = make_context(resources={"num_gpus": 8, "tensor_parallel_size": 8})
    context.registry.sync(context.spec)
    costs = Costs(context)
    metrics = {"num_tokens": 60.0, "engine_s": 60.0}
    one = Manifest(stage="x", fingerprint="f", content_id="c", spec={}, inputs={}, metrics=metrics)
    costs.measure(ids.SYNTHETIC_GENERATIONS, 1, one)
    rows = [row for row in plan(context).rows if row.stage == ids.SYNTHETIC_GENERATIONS]
    estimate = costs.estimates(rows, context.registry.chunks())[ids.SYNTHETIC_GENERATIONS]
    # Five rows of 60 tokens at one token a second on eight GPUs.
    assert estimate.device_minutes == pytest.approx(5 * 60 / 60 * 8)
