"""`nightly_retrain`: stopped until somebody switches it on."""

import dagster as dg
from dagster._utils.schedules import is_valid_cron_string

from eagle3_pipeline.assets.jobs import UPDATE, job_name
from eagle3_pipeline.assets.retrain import begin
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import ConfigError


def build_nightly_retrain(spec: PipelineSpec) -> dg.ScheduleDefinition:
    """Plans at `schedule.cron`; requests the runs of what is stale, or says why none."""
    if not is_valid_cron_string(spec.schedule.cron):
        raise ConfigError(f"{spec.name}: schedule.cron: {spec.schedule.cron!r} is no cron expression")

    @dg.schedule(
        name=f"{spec.name}__nightly_retrain",
        job_name=job_name(spec, UPDATE),
        cron_schedule=spec.schedule.cron,
        execution_timezone=spec.schedule.timezone,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=f"Retrains the draft if data or settings changed. Switch on {spec.name}__retrain_when_ready, too: "
        "it requests what can only start once these runs are done.",
    )
    def nightly_retrain(context: dg.ScheduleEvaluationContext) -> list[dg.RunRequest] | dg.SkipReason:
        step = begin(spec, context.instance, context.log.info)
        return step.requests or dg.SkipReason(step.message)

    return nightly_retrain
