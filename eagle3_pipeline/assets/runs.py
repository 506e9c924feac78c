"""Runs of a pipeline on a Dagster instance: their tags, what is in flight, what failed."""

import os
from collections import Counter
from datetime import datetime
from pathlib import Path

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunRecord, RunsFilter
from dagster._core.execution.plan.objects import StepFailureData

from eagle3_pipeline.assets.common import EDITED, PIPELINE_TAG, REFUSED_BY, SPEC_TAG
from eagle3_pipeline.assets.work import Work
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.engine.breaker import read_failures
from eagle3_pipeline.workers import process_started

WORK_TAG = "eagle3/work"
STAGES_TAG = "eagle3/stages"
RETRAIN_TAG = "eagle3/retrain"
PROCESS_TAG = "eagle3/process"
PARTITION_TAG = "dagster/partition"
UNFINISHED = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def run_tags(spec: PipelineSpec, work: Work, retrain: str = "") -> dict[str, str]:
    """Tags of a run that does `work`, without the partition's own."""
    tags = {
        PIPELINE_TAG: spec.name,
        SPEC_TAG: spec.spec_hash(),
        WORK_TAG: work.work_id,
        STAGES_TAG: ",".join(work.stages),
    }
    return tags | ({RETRAIN_TAG: retrain} if retrain else {})


def process_tag() -> dict[str, str]:
    """The tag of a run that this process executes: Dagster does not notice when it is killed."""
    return {PROCESS_TAG: f"{os.getpid()} {process_started(os.getpid())}"}


def _was_killed(run: DagsterRun) -> bool:
    """Whether the process that executed the run is gone; one that Dagster executes again has the first one's tags."""
    pid, _, started = run.tags.get(PROCESS_TAG, "").partition(" ")
    return bool(pid) and run.parent_run_id is None and str(process_started(int(pid))) != started


def in_flight(instance: dg.DagsterInstance, spec: PipelineSpec) -> set[str]:
    """Chunks that a queued or running run of the pipeline works on, whoever launched it; "": an unpartitioned stage."""
    runs = instance.get_runs(RunsFilter(statuses=UNFINISHED))
    return {run.tags.get(PARTITION_TAG, "") for run in runs if _belongs_to(run, spec) and not _was_killed(run)}


def count_unfinished(instance: dg.DagsterInstance) -> dict[str, int]:
    """Runs that are queued or running, by status, and those that a killed command left so."""
    runs = instance.get_runs(RunsFilter(statuses=UNFINISHED))
    return dict(Counter("ended with a killed command" if _was_killed(r) else r.status.value.lower() for r in runs))


def _belongs_to(run: DagsterRun, spec: PipelineSpec) -> bool:
    selected = run.asset_selection or ()
    return run.job_name.startswith(f"{spec.name}__") or any(key.path[0] == spec.name for key in selected)


def failed_attempts(instance: dg.DagsterInstance, spec: PipelineSpec) -> Counter[str]:
    """Failed runs by the work that they were launched for, since it last succeeded.

    What people cancelled or interrupted did not fail, nor did what was refused because the pipeline file was edited, or
    by an engine that was reset since.
    """
    filters = RunsFilter(tags={PIPELINE_TAG: spec.name}, statuses=[DagsterRunStatus.FAILURE])
    failed = [record for record in instance.get_run_records(filters) if WORK_TAG in record.dagster_run.tags]
    since = _last_successes(instance, {_work(record) for record in failed}) if failed else {}
    return Counter(
        _work(record)
        for record in failed
        if not (_work(record) in since and record.create_timestamp < since[_work(record)])
        and not _is_excused(instance, record.dagster_run.run_id)
    )


def _last_successes(instance: dg.DagsterInstance, works: set[str]) -> dict[str, datetime]:
    """When the last run of each work began that succeeded."""
    filters = RunsFilter(tags={WORK_TAG: sorted(works)}, statuses=[DagsterRunStatus.SUCCESS])
    return {_work(record): record.create_timestamp for record in instance.get_run_records(filters, ascending=True)}


def _work(record: RunRecord) -> str:
    return record.dagster_run.tags[WORK_TAG]


def first_step_failure(instance: dg.DagsterInstance, run_id: str) -> StepFailureData | None:
    """Of a run; `None` if no step of it failed."""
    records = instance.get_records_for_run(run_id, of_type=dg.DagsterEventType.STEP_FAILURE, limit=1).records
    event = records[0].event_log_entry.dagster_event if records else None
    return event.step_failure_data if event else None


def was_interrupted(data: StepFailureData) -> bool:
    """Whether somebody ended the step."""
    return data.error is not None and data.error.cls_name == "DagsterExecutionInterruptedError"


def failure_reason(data: StepFailureData | None) -> str:
    """Our own message where there is one, else the exception's; empty if neither is known."""
    if data and data.user_failure_data and data.user_failure_data.description:
        return data.user_failure_data.description
    return data.error.message.strip() if data and data.error else ""


def _is_excused(instance: dg.DagsterInstance, run_id: str) -> bool:
    data = first_step_failure(instance, run_id)
    if data is None:
        return False
    if was_interrupted(data):
        return True
    metadata = data.user_failure_data.metadata if data.user_failure_data else {}
    if REFUSED_BY in metadata:
        return not read_failures(Path(str(metadata[REFUSED_BY].value))).tripped
    return "error" in metadata and metadata["error"].value == EDITED


def runs_of_retrain(instance: dg.DagsterInstance, retrain: str) -> list[DagsterRun]:
    """All runs that a retrain launched."""
    return list(instance.get_runs(RunsFilter(tags={RETRAIN_TAG: retrain})))
