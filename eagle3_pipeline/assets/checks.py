"""`up_to_date`: whether the vocabulary and the draft were made of the current chunks and settings, and what differs.

Dagster's own staleness does not reach an unpartitioned asset from a hundred upstream partitions on.
"""

from dataclasses import dataclass
from typing import Any

import dagster as dg

from eagle3_pipeline.assets.common import asset_key
from eagle3_pipeline.assets.resources import PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.planning import Status, plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext

UP_TO_DATE = "up_to_date"
CHECKED_STAGES = (ids.VOCAB_MAP, ids.DRAFT_CHECKPOINT)


@dataclass(frozen=True)
class Freshness:
    """Result of the check of one stage."""

    passed: bool
    why: str
    metadata: dict[str, Any]
    # Of the plan that the metadata shows, for whoever asks whether that is still the plan.
    summary: str


def freshness(context: StageContext) -> dict[str, Freshness]:
    """Results for those of the checked stages that were ever materialised, by stage."""
    found = plan(context)
    table = dg.MetadataValue.md(found.table("github"))
    changed = [f"{row.stage}[{row.chunk}]: {row.status}: {row.reason}" for row in found.todo if row.chunk]
    results = {}
    for row in found.rows:
        if row.stage in CHECKED_STAGES and context.references.get(row.stage, None):
            why = row.reason if row.status is not Status.FRESH else ""
            if why and changed:
                why = f"{why}; first: {changed[0]}"
            metadata = {"plan": table, "num_changed_chunk_stages": len(changed)}
            results[row.stage] = Freshness(row.status is Status.FRESH, why, metadata, found.summary())
    return results


def build_up_to_date(spec: PipelineSpec) -> list[dg.AssetChecksDefinition]:
    """One check on each of the stages; also evaluated by the sensor of staleness."""
    return [_build(spec, stage) for stage in CHECKED_STAGES]


def _build(spec: PipelineSpec, stage: str) -> dg.AssetChecksDefinition:
    @dg.asset_check(
        asset=asset_key(spec, stage),
        name=UP_TO_DATE,
        description="Made of the current chunks and settings; if not: what changed, and the plan.",
    )
    def up_to_date(home: PipelineHome) -> dg.AssetCheckResult:
        result = freshness(StageContext(spec, home=home.path())).get(stage)
        warn = dg.AssetCheckSeverity.WARN
        if result is None:
            return dg.AssetCheckResult(passed=False, severity=warn, description="not materialised")
        return dg.AssetCheckResult(
            passed=result.passed, severity=warn, metadata=result.metadata, description=result.why or None
        )

    return up_to_date
