"""Runs of a pipeline on a Dagster instance: their tags, what is in flight, what failed."""

from collections import Counter

import dagster as dg
from dagster import DagsterRun, DagsterRunStatus, RunsFilter

from eagle3_pipeline.assets.common import PIPELINE_TAG, SPEC_TAG
from eagle3_pipeline.assets.work import Work
from eagle3_pipeline.config import PipelineSpec

WORK_TAG = "eagle3/work"
STAGES_TAG = "eagle3/stages"
RETRAIN_TAG = "eagle3/retrain"
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


def in_flight(instance: dg.DagsterInstance, spec: PipelineSpec) -> set[str]:
    """Chunks that a queued or running run of the pipeline works on, whoever launched it; "": an unpartitioned stage."""
    runs = instance.get_runs(RunsFilter(statuses=UNFINISHED))
    return {run.tags.get(PARTITION_TAG, "") for run in runs if _belongs_to(run, spec)}


def count_unfinished(instance: dg.DagsterInstance) -> dict[str, int]:
    """Runs that are queued or running, by status."""
    return dict(Counter(run.status.value.lower() for run in instance.get_runs(RunsFilter(statuses=UNFINISHED))))


def _belongs_to(run: DagsterRun, spec: PipelineSpec) -> bool:
    selected = run.asset_selection or ()
    return run.job_name.startswith(f"{spec.name}__") or any(key.path[0] == spec.name for key in selected)


def failed_attempts(instance: dg.DagsterInstance, spec: PipelineSpec) -> Counter[str]:
    """Failed runs by the work that they were launched for; what people cancelled did not fail."""
    filters = RunsFilter(tags={PIPELINE_TAG: spec.name}, statuses=[DagsterRunStatus.FAILURE])
    return Counter(run.tags[WORK_TAG] for run in instance.get_runs(filters) if WORK_TAG in run.tags)


def runs_of_retrain(instance: dg.DagsterInstance, retrain: str) -> list[DagsterRun]:
    """All runs that a retrain launched."""
    return list(instance.get_runs(RunsFilter(tags={RETRAIN_TAG: retrain})))
