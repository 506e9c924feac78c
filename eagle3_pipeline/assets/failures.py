"""Failed runs, told in one line each."""

from collections.abc import Collection

import dagster as dg

from eagle3_pipeline.assets.runs import PARTITION_TAG, failure_reason
from eagle3_pipeline.config import PipelineSpec


def build_failure_report(specs: list[PipelineSpec]) -> dg.SensorDefinition:
    """One line per failed run, in the log of the daemon and of the sensor."""
    names = {spec.name for spec in specs}

    @dg.run_failure_sensor(
        name="report_failures",
        minimum_interval_seconds=30,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Logs one line for each failed run: pipeline, chunk, step, reason.",
    )
    def report_failures(context: dg.RunFailureSensorContext) -> None:
        context.log.error(failure_line(context, names))

    return report_failures


def failure_line(context: dg.RunFailureSensorContext, pipelines: Collection[str]) -> str:
    """Pipeline, chunk, step and reason of a failed run."""
    run = context.dagster_run
    selected = {key.path[0] for key in run.asset_selection or ()} & set(pipelines)
    pipeline = ", ".join(sorted(selected)) or run.job_name.split("__")[0]
    chunk = f" chunk {run.tags[PARTITION_TAG]}" if PARTITION_TAG in run.tags else ""
    events = context.get_step_failure_events()
    step = events[0].step_key if events else "the run"
    return f"{pipeline}:{chunk} {step} failed: {_reason(context)} (run {run.run_id})"


def _reason(context: dg.RunFailureSensorContext) -> str:
    for event in context.get_step_failure_events():
        if reason := failure_reason(event.step_failure_data):
            return reason.splitlines()[0]
    return (context.failure_event.message or "no reason is known").splitlines()[0]
