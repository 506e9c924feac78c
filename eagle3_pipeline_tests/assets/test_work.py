"""Which runs follow from a plan, and in which order."""

from typing import Any

import pytest

from eagle3_pipeline.assets.work import Work, next_work
from eagle3_pipeline.planning import Plan, PlanRow, Status
from eagle3_pipeline.stages import identity as ids

ONE_PASS = [ids.CHUNK_STAGES]
TWO_PASSES: list[tuple[str, ...]] = [(ids.DATASET, ids.SYNTHETIC_GENERATIONS), (ids.HIDDEN_STATES,)]
WORK_IDS = {"": "tail", "0": "w0", "1": "w1", "2": "w2"}


def make_plan(left_out: Any = (), **statuses: Any) -> Plan:
    """A plan of three chunks; all lines are fresh but those of `stage=status` or `stage_chunk=status`."""
    rows = []
    for stage in ids.FORMAT_VERSIONS:
        for chunk in ("0", "1", "2") if stage in ids.CHUNK_STAGES else ("",):
            name = f"{stage}_{chunk}" if chunk else stage
            rows.append(PlanRow(stage, chunk, Status(statuses.pop(name, "fresh"))))
    assert not statuses
    return Plan("p", rows, WORK_IDS, left_out=left_out)


TAIL_PENDING = dict.fromkeys(("draft_checkpoint", "draft_evaluation", "published_draft"), "pending")
NEW_CHUNK = {"dataset_1": "missing", "synthetic_generations_1": "pending", "hidden_states_1": "pending"}


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (make_plan(), []),
        # The verifier alone, whatever else is stale.
        (make_plan(verifier="stale", dataset_0="stale"), [Work(("verifier",), "", "tail")]),
        # A chunk's stages in one run; what is fresh is left out; chunks before the tail.
        (
            make_plan(**NEW_CHUNK, hidden_states_2="corrupt", vocab_map="pending", **TAIL_PENDING),
            [Work(ids.CHUNK_STAGES, "1", "w1"), Work(("hidden_states",), "2", "w2")],
        ),
        # The baseline while the chunks' engine is there, then the rest in one run.
        (make_plan(baseline="stale", vocab_map="stale", **TAIL_PENDING), [Work(("baseline",), "", "tail")]),
        (
            make_plan(vocab_map="stale", **TAIL_PENDING),
            [Work(("vocab_map", "draft_checkpoint", "draft_evaluation", "published_draft"), "", "tail")],
        ),
        # A chunk that failed too often blocks the tail, unless the tail may do without it.
        (make_plan(dataset_1="failed", vocab_map="pending", **TAIL_PENDING), []),
        (
            make_plan(("1",), hidden_states_1="failed", draft_checkpoint="stale"),
            [Work(("draft_checkpoint",), "", "tail")],
        ),
        # Others go on.
        (make_plan(dataset_1="failed", dataset_2="stale"), [Work(("dataset",), "2", "w2")]),
        (make_plan(draft_checkpoint="failed", draft_evaluation="pending", published_draft="pending"), []),
    ],
)
def test_next_work(plan: Plan, expected: list[Work]) -> None:
    assert next_work(plan, ONE_PASS) == expected


def test_two_passes_generate_everything_before_they_capture() -> None:
    plan = make_plan(**NEW_CHUNK, hidden_states_2="missing")
    assert next_work(plan, TWO_PASSES) == [Work(("dataset", "synthetic_generations"), "1", "w1")]
    plan = make_plan(hidden_states_1="missing", hidden_states_2="missing")
    assert [work.stages for work in next_work(plan, TWO_PASSES)] == [("hidden_states",)] * 2


def test_what_is_fresh_but_not_pointed_to_runs() -> None:
    plan = make_plan()
    rows = [PlanRow(row.stage, row.chunk, row.status, linked=row.chunk != "2") for row in plan.rows]
    assert next_work(Plan("p", rows, WORK_IDS), ONE_PASS) == [Work(ids.CHUNK_STAGES, "2", "w2")]


def test_two_failures_mark_what_could_run_and_no_other() -> None:
    plan = make_plan(**NEW_CHUNK, dataset_2="stale").with_failures({"w1": 2, "w2": 1, "other": 9})
    failed = [(row.stage, row.chunk) for row in plan.rows if row.status is Status.FAILED]
    assert failed == [("dataset", "1")]
    assert plan.rows[plan.rows.index(next(r for r in plan.rows if r.status is Status.FAILED))].reason.startswith(
        "failed 2 times"
    )
