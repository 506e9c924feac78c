"""Sensors of a pipeline: new chunks appear, stale aggregates show, a retrain goes on."""

import json

import dagster as dg
from dagster import AssetCheckEvaluation, AssetObservation

from eagle3_pipeline.assets.checks import UP_TO_DATE, freshness
from eagle3_pipeline.assets.common import asset_key
from eagle3_pipeline.assets.jobs import UPDATE, job_name
from eagle3_pipeline.assets.partitions import chunk_partitions, observation, unpublished_chunks
from eagle3_pipeline.assets.retrain import carry_on
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.stages.context import StageContext

_INTERVAL_S = 30
# A tick has to end within Dagster's limit of 60 s.
_READ_FOR_S = 25.0
# 500 events took 32 s on SQLite.
_CHUNKS_PER_TICK = 200


def build_new_chunks(spec: PipelineSpec) -> dg.SensorDefinition:
    """Looks at the source: new chunks become partitions, changed ones unsynced. Launches nothing."""

    @dg.sensor(
        name=f"{spec.name}__new_chunks",
        minimum_interval_seconds=_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Adds a partition for each new chunk of the source; a changed file makes its chunks unsynced.",
    )
    def new_chunks(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        stage = StageContext(spec, context.log.info)
        try:
            synced = stage.registry.sync(spec, _READ_FOR_S)
        except Eagle3Error as error:
            return dg.SkipReason(f"the source cannot be read now, all chunks stay as they are: {error}")
        chunks = stage.registry.chunks()
        missing, observed = unpublished_chunks(context.instance, spec, chunks)
        cursor = json.dumps({"num_chunks": len(chunks), "unread_files": synced.num_unread, "left": len(observed)})
        if not observed:
            message = f"{len(chunks)} chunks, nothing new"
            if synced.num_unread:
                message += f"; {synced.num_unread} files are still to be read"
            return dg.SensorResult(skip_reason=message, cursor=cursor)
        batch = observed[:_CHUNKS_PER_TICK]
        keys = [chunk.key for chunk in batch if chunk.key in missing]
        context.log.info(f"{spec.name}: {len(keys)} chunks added, {len(batch) - len(keys)} changed")
        return dg.SensorResult(
            dynamic_partitions_requests=[chunk_partitions(spec).build_add_request(keys)] if keys else [],
            asset_events=[observation(spec, chunk) for chunk in batch],
            cursor=cursor,
        )

    return new_chunks


def build_staleness(spec: PipelineSpec) -> dg.SensorDefinition:
    """Evaluates the `up_to_date` checks where the plan changed: Dagster itself does not, beyond 100 chunks."""

    @dg.sensor(
        name=f"{spec.name}__staleness",
        minimum_interval_seconds=_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Shows on the unpartitioned assets when chunks or settings changed, and which.",
    )
    def staleness(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        stage = StageContext(spec, context.log.info)
        try:
            stage.find_verifier(offline=True)
            found = freshness(stage)
        except Eagle3Error as error:
            return dg.SkipReason(f"cannot plan: {error}")
        now = {name: [one.passed, one.why, one.summary] for name, one in found.items()}
        cursor = json.dumps(now, sort_keys=True)
        if cursor == context.cursor:
            return dg.SkipReason("as before")
        before = json.loads(context.cursor or "{}")
        events: list[AssetCheckEvaluation | AssetObservation] = [
            AssetCheckEvaluation(
                asset_key=asset_key(spec, name),
                check_name=UP_TO_DATE,
                passed=one.passed,
                severity=dg.AssetCheckSeverity.WARN,
                metadata=one.metadata,
                description=one.why or None,
            )
            for name, one in found.items()
            if before.get(name) != now[name]
        ]
        return dg.SensorResult(asset_events=events, cursor=cursor)

    return staleness


def build_retrain_when_ready(spec: PipelineSpec) -> dg.SensorDefinition:
    """Carries a begun retrain on: chunks, then vocabulary, training, evaluation, promotion."""

    @dg.sensor(
        name=f"{spec.name}__retrain_when_ready",
        job_name=job_name(spec, UPDATE),
        minimum_interval_seconds=_INTERVAL_S,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=f"Requests the next runs of a retrain that {spec.name}__nightly_retrain began.",
    )
    def retrain_when_ready(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        step = carry_on(spec, context.instance, context.log.info)
        return dg.SensorResult(run_requests=step.requests, skip_reason=None if step.requests else step.message)

    return retrain_when_ready
