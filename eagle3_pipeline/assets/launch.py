"""Runs what a plan asks for, in this process, on a real Dagster instance."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import dagster as dg

from eagle3_pipeline.assets import jobs
from eagle3_pipeline.assets.common import asset_key
from eagle3_pipeline.assets.partitions import publish_chunks
from eagle3_pipeline.config import PipelineSpec, project_home
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.planning import Plan, plan, plan_chunk
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.verifier_outputs import one_pass
from eagle3_pipeline.store.atomic import storage_error

_RUN_CONFIG = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}  # without it, no logger is made


@dataclass
class Launched:
    """What was run.

    Attributes:
        num_runs: Dagster runs.
        engine_starts: engine starts by job.
    """

    num_runs: int = 0
    engine_starts: dict[str, int] = field(default_factory=dict)


def dagster_home() -> Path:
    """`EAGLE3_HOME/dagster_home`, made on first use, with the checkout's dagster.yaml linked into it."""
    home = project_home() / "dagster_home"
    settings = Path(__file__).parents[2] / "dagster.yaml"
    link = home / "dagster.yaml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if settings.exists() and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(settings)
    except OSError as error:
        raise storage_error(error, home) from error
    return home


def open_instance() -> dg.DagsterInstance:
    """The instance that `make dev` shows."""
    home = str(dagster_home())
    os.environ["DAGSTER_HOME"] = home
    return dg.DagsterInstance.from_config(home)


def sync_chunks(spec: PipelineSpec, instance: dg.DagsterInstance, log: Callable[[str], None]) -> None:
    """Looks at the source, appends new chunks, shows changed ones as unsynced."""
    context = StageContext(spec, log)
    result = context.registry.sync(spec)
    publish_chunks(instance, spec, context.registry.chunks())
    log(
        f"{spec.name}: {len(result.added)} chunks added, {len(result.changed)} changed, "
        f"{len(result.unchanged)} unchanged"
    )


def materialise_stale(
    spec: PipelineSpec, definitions: dg.Definitions, instance: dg.DagsterInstance, log: Callable[[str], None]
) -> Launched:
    """Runs the jobs of all stages that are not fresh, chunk by chunk, then the unpartitioned ones.

    Raises:
        Eagle3Error: a run failed.
    """
    context = StageContext(spec, log)
    context.all_chunks()
    launched = Launched()
    # First, because Dagster shows as unsynced what was materialised before its upstream.
    _run_job(spec, definitions, instance, context, (jobs.RESOLVE_VERIFIER, None), launched)
    chunks = sorted({row.chunk for row in plan(context).to_run if row.chunk})
    for stages in _passes(context):
        for number, chunk in enumerate(chunks, 1):
            log(f"{spec.name}: chunk {chunk} ({number} of {len(chunks)})")
            for job in (jobs.PREPARE_DATA, jobs.GENERATE_AND_CAPTURE):
                _run_job(spec, definitions, instance, context, (job, chunk), launched, stages)
    for job in (jobs.MEASURE_BASELINE, jobs.TRAIN_AND_EVALUATE):
        _run_job(spec, definitions, instance, context, (job, None), launched)
    return launched


def _passes(context: StageContext) -> list[tuple[str, ...]]:
    """Stages of the chunks, pass by pass: engines of two kinds must not take turns at every chunk."""
    if one_pass(context):
        return [ids.CHUNK_STAGES]
    return [(ids.DATASET, ids.SYNTHETIC_GENERATIONS), (ids.HIDDEN_STATES,)]


def _run_job(
    spec: PipelineSpec,
    definitions: dg.Definitions,
    instance: dg.DagsterInstance,
    context: StageContext,
    target: tuple[str, str | None],
    launched: Launched,
    among: tuple[str, ...] | None = None,
) -> None:
    """Runs the stages of a job that the plan asks for; `target` is the job and the chunk."""
    job, chunk = target
    wanted = [stage for stage in jobs.JOB_STAGES[job] if among is None or stage in among]
    current = plan_chunk(context, chunk) if chunk else plan(context)
    stages = list(_todo(current, wanted, chunk))
    if not stages:
        return
    before = len(context.engines.starts())
    result = definitions.resolve_job_def(jobs.job_name(spec, job)).execute_in_process(
        run_config=_RUN_CONFIG,
        instance=instance,
        partition_key=chunk,
        asset_selection=[asset_key(spec, stage) for stage in stages],
        raise_on_error=False,
    )
    launched.num_runs += 1
    launched.engine_starts[job] = launched.engine_starts.get(job, 0) + len(context.engines.starts()) - before
    if not result.success:
        raise Eagle3Error(f"{spec.name}: run {result.run_id} of {job} failed: {_failure(result)}")


def _todo(current: Plan, stages: list[str], chunk: str | None) -> Iterator[str]:
    for row in current.to_run:
        if row.stage in stages and row.chunk == (chunk or ""):
            yield row.stage


def _failure(result: dg.ExecuteInProcessResult) -> str:
    failures = [event for event in result.all_events if event.is_step_failure]
    if not failures:
        return "see the run's log"
    data = failures[0].step_failure_data
    if data.user_failure_data and data.user_failure_data.description:
        return data.user_failure_data.description
    error = data.error
    if error is None or error.cls_name == "DagsterExecutionInterruptedError":
        return "it was interrupted; run it again, and it continues"
    while error.cause:
        error = error.cause
    return f"{error.message.strip()} (the run's log in the Dagster UI has the traceback)"
