"""Retrains, tick by tick: what is requested, when it ends, and what it survives. Runs are executed in this process."""

import json
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster import DagsterRunStatus, RunsFilter
from dagster._core.errors import DagsterExecutionInterruptedError

from eagle3_pipeline.assets import launch, retrain, work
from eagle3_pipeline.assets.retrain import Step, begin, carry_on, read_retrain
from eagle3_pipeline.assets.runs import RETRAIN_TAG, WORK_TAG, failed_attempts
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline_tests.assets.conftest import Pipeline

THIRD = "000002"


@pytest.fixture(autouse=True)
def _vocabulary_ends_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and serving have tests of their own; here the chain ends with the vocabulary."""
    short = (ids.VERIFIER, *ids.CHUNK_STAGES, ids.VOCAB_MAP)
    for module in (retrain, launch):
        monkeypatch.setattr(module, "plan", lambda context: launch.Selection(short).plan(plan(context)))
    monkeypatch.setattr(work.ids, "TAIL_STAGES", (ids.VOCAB_MAP,))


class Daemon:
    """Does with a step what Dagster's daemon does: each run key once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.used: set[str | None] = set()

    def tick(self, evaluate: Any) -> Step:
        """Evaluates and executes."""
        step = evaluate(self.pipeline.spec, self.pipeline.instance, print)
        job = build_definitions([self.pipeline.spec]).resolve_job_def(f"{self.pipeline.name}__update")
        for request in step.requests:
            if request.run_key not in self.used:
                self.used.add(request.run_key)
                job.execute_in_process(
                    instance=self.pipeline.instance,
                    partition_key=request.partition_key,
                    asset_selection=request.asset_selection,
                    tags=dict(request.tags),
                    raise_on_error=False,
                )
        return step

    def until_done(self) -> list[list[tuple[str | None, list[str]]]]:
        """Ticks of `carry_on` until the retrain ends: the requests of each."""
        ticks = []
        for _ in range(12):
            step = self.tick(carry_on)
            ticks.append(_requests(step))
            found = read_retrain(self.pipeline.context.references.folder)
            if found and found.outcome:
                return ticks
        raise AssertionError(f"no end after {ticks}")


def _requests(step: Step) -> list[tuple[str | None, list[str]]]:
    return [(r.partition_key, [key.path[1] for key in r.asset_selection or ()]) for r in step.requests]


def _outcome(pipeline: Pipeline) -> str:
    found = read_retrain(pipeline.context.references.folder)
    assert found
    return found.outcome


@pytest.fixture
def daemon(pipeline: Pipeline) -> Daemon:
    """Two chunks and the vocabulary are fresh."""
    found = Daemon(pipeline)
    step = found.tick(begin)
    assert [chunk for chunk, _ in _requests(step)] == ["000000", "000001"]
    assert found.until_done() == [[(None, ["vocab_map"])], []]
    assert _outcome(pipeline) == "published"
    return found


def test_nothing_new_is_skipped_with_the_reason(daemon: Daemon) -> None:
    assert daemon.tick(begin) == Step([], "nothing changed: everything is fresh")
    assert daemon.tick(carry_on).message == "no retrain is under way; the last one: published"


def test_only_new_chunks_run_and_the_tail_once(daemon: Daemon, pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    before = pipeline.num_starts()
    assert _requests(daemon.tick(begin)) == [(THIRD, list(ids.CHUNK_STAGES))]
    assert daemon.until_done() == [[(None, ["vocab_map"])], []]
    assert pipeline.num_starts() == before, "the engine is still there"
    assert daemon.tick(begin).requests == []


def test_a_lost_tick_is_made_up_for_by_the_next(daemon: Daemon, pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    lost = begin(pipeline.spec, pipeline.instance, print)
    assert len(lost.requests) == 1
    assert daemon.until_done() == [[(THIRD, list(ids.CHUNK_STAGES))], [(None, ["vocab_map"])], []]


def test_a_second_begin_goes_on_with_the_same_retrain(daemon: Daemon, pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    first = begin(pipeline.spec, pipeline.instance, print)
    second = begin(pipeline.spec, pipeline.instance, print)
    assert first.requests[0].tags[RETRAIN_TAG] == second.requests[0].tags[RETRAIN_TAG]
    assert first.requests[0].run_key == second.requests[0].run_key


def test_what_is_in_flight_is_waited_for_whoever_launched_it(daemon: Daemon, pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__prepare_data")
    run = pipeline.instance.create_run_for_job(job, tags={"dagster/partition": THIRD}, status=DagsterRunStatus.STARTED)
    step = begin(pipeline.spec, pipeline.instance, print)
    assert step.requests == [] and step.message.startswith("waiting for 1 runs")
    pipeline.instance.delete_run(run.run_id)
    assert _requests(daemon.tick(carry_on)) == [(THIRD, list(ids.CHUNK_STAGES))]


def test_a_chunk_that_fails_twice_is_left_out_and_named(
    daemon: Daemon, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.configure(dataset={"min_yield": 1.0})
    pipeline.write_rows("c.jsonl", ["nine", ""])
    pipeline.write_rows("d.jsonl", ["good", "better"])
    pipeline.sync()
    bad, good = (THIRD, list(ids.CHUNK_STAGES)), ("000003", list(ids.CHUNK_STAGES))
    assert _requests(daemon.tick(begin)) == [bad, good]
    assert daemon.until_done() == [[bad], []]
    assert f"left out, failed too often: dataset {THIRD}" in _outcome(pipeline)
    # The next night does not try again, and says so.
    step = daemon.tick(begin)
    assert step.requests == [] and f"failed too often: dataset {THIRD}" in step.message
    # With a part of the chunks allowed to be missing, the tail goes on.
    pipeline.configure(dataset={"min_yield": 1.0}, schedule={"min_fresh_fraction": 0.75})
    assert _requests(daemon.tick(begin)) == [(None, ["vocab_map"])]
    daemon.until_done()
    assert set(pipeline.context.upstream(ids.VOCAB_MAP).manifest.inputs["token_counts"]) == {
        "000000",
        "000001",
        "000003",
    }
    # Another content is another work: its attempts start from the beginning.
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    assert _requests(daemon.tick(begin)) == [bad]


def test_a_cancelled_run_ends_the_retrain(daemon: Daemon, pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    request = begin(pipeline.spec, pipeline.instance, print).requests[0]
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")
    pipeline.instance.create_run_for_job(job, tags=dict(request.tags), status=DagsterRunStatus.CANCELED)
    assert daemon.tick(carry_on).requests == []
    assert _outcome(pipeline) == "ended, because one of its runs was cancelled"


def test_a_run_that_succeeds_without_effect_does_not_run_for_ever(
    daemon: Daemon, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    request = begin(pipeline.spec, pipeline.instance, print).requests[0]
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")
    tags = {**request.tags, "dagster/partition": THIRD}
    pipeline.instance.create_run_for_job(job, tags=tags, status=DagsterRunStatus.SUCCESS)
    assert daemon.tick(carry_on).requests == []
    assert "is not fresh although its run succeeded" in _outcome(pipeline)


@pytest.mark.parametrize(("minimum", "requested"), [(0.0, 1), (0.2, 1), (0.21, 0)])
def test_too_little_new_data_waits(
    daemon: Daemon, pipeline: Pipeline, minimum: float, requested: int, monkeypatch: Any
) -> None:
    """Two new rows of ten."""
    monkeypatch.setattr(retrain, "new_data_fraction", lambda *_: 0.2)
    pipeline.configure(schedule={"min_new_fraction": minimum})
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    step = begin(pipeline.spec, pipeline.instance, print)
    assert len(step.requests) == requested
    if not requested:
        assert step.message == "new data is 20.0% of all rows, schedule.min_new_fraction is 21.0%"


def test_a_pipeline_that_cannot_be_planned_says_why(daemon: Daemon, pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "tiny").rename(tmp_path / "elsewhere")
    step = begin(pipeline.spec, pipeline.instance, print)
    assert step.requests == [] and step.message.startswith("cannot plan: ")


def test_runs_carry_what_they_were_launched_for(daemon: Daemon, pipeline: Pipeline) -> None:
    runs = pipeline.instance.get_runs(RunsFilter(tags={"eagle3/pipeline": "fake", "dagster/partition": "000001"}))
    (run,) = [run for run in runs if RETRAIN_TAG in run.tags]
    assert run.tags[WORK_TAG] == plan(pipeline.context).work_ids["000001"]
    assert run.tags["eagle3/spec_hash"] == pipeline.spec.spec_hash()


def test_a_run_of_an_edited_pipeline_fails_with_that_reason(pipeline: Pipeline) -> None:
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")
    result = job.execute_in_process(
        instance=pipeline.instance,
        partition_key="000000",
        asset_selection=[dg.AssetKey(["fake", "dataset"])],
        tags={"eagle3/spec_hash": "0123456789abcdef"},
        raise_on_error=False,
    )
    (failure,) = [event for event in result.all_events if event.is_step_failure]
    data: Any = failure.step_failure_data
    assert "was edited after this run was launched: settings 0123456789abcdef then, " in json.dumps(
        data.user_failure_data.description
    )


def test_three_hundred_chunks_are_requested_in_one_tick_and_then_the_tail(pipeline: Pipeline) -> None:
    for number in range(298):
        pipeline.write_rows(f"n{number:03d}.jsonl", [f"row {number}"])
    pipeline.sync()
    step = begin(pipeline.spec, pipeline.instance, print)
    assert [request.partition_key for request in step.requests] == [f"{number:06d}" for number in range(300)]
    assert len({request.run_key for request in step.requests}) == 300
    # Half of them run, and are known to run: the other half is requested again, under the same keys.
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")
    for request in step.requests[:150]:
        tags = {**request.tags, "dagster/partition": str(request.partition_key)}
        pipeline.instance.create_run_for_job(job, tags=tags, status=DagsterRunStatus.STARTED)
    again = carry_on(pipeline.spec, pipeline.instance, print)
    assert [request.run_key for request in again.requests] == [request.run_key for request in step.requests[150:]]


def test_what_was_interrupted_or_refused_for_an_edit_is_no_failure_of_the_work(
    daemon: Daemon, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.write_rows("c.jsonl", ["nine", "ten"])
    pipeline.sync()
    request = begin(pipeline.spec, pipeline.instance, print).requests[0]
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")

    def run(**tags: str) -> bool:
        return job.execute_in_process(
            instance=pipeline.instance,
            partition_key=THIRD,
            asset_selection=request.asset_selection,
            tags={**request.tags, **tags},
            raise_on_error=False,
        ).success

    for _ in range(2):
        assert not run(**{"eagle3/spec_hash": "0123456789abcdef"})

    def interrupt(*_: Any) -> None:
        raise DagsterExecutionInterruptedError

    with monkeypatch.context() as patched:
        patched.setattr("eagle3_pipeline.assets.dataset.materialise_dataset", interrupt)
        for _ in range(2):
            assert not run()
    assert sum(failed_attempts(pipeline.instance, pipeline.spec).values()) == 0
    with monkeypatch.context() as patched:
        patched.setattr("eagle3_pipeline.assets.dataset.materialise_dataset", lambda *_: 1 / 0)
        assert not run()
    assert sum(failed_attempts(pipeline.instance, pipeline.spec).values()) == 1
    assert run()
    assert not failed_attempts(pipeline.instance, pipeline.spec), "it succeeded since"
    with monkeypatch.context() as patched:
        patched.setattr("eagle3_pipeline.assets.dataset.materialise_dataset", lambda *_: 1 / 0)
        assert not run()
    assert sum(failed_attempts(pipeline.instance, pipeline.spec).values()) == 1


def test_a_copied_file_is_no_chunk_to_wait_for(daemon: Daemon, pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["one", "two", "three", "four"])
    pipeline.sync()
    assert daemon.tick(begin).message == "nothing changed: everything is fresh"
    pipeline.write_rows("d.jsonl", ["one", "new"])
    pipeline.sync()
    assert [chunk for chunk, _ in _requests(daemon.tick(begin))] == ["000003"]
    daemon.until_done()
    assert _outcome(pipeline) == "published"
