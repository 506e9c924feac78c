"""`draft_evaluation`: the draft, served."""

import dagster as dg

from eagle3_pipeline.assets.common import (
    GPU_POOL,
    asset_arguments,
    asset_key,
    check,
    check_spec,
    stage_context,
    stage_output,
)
from eagle3_pipeline.assets.resources import GpuPool, PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.evaluation.report import agrees
from eagle3_pipeline.stages.draft_evaluation import REPORT, materialise_evaluation
from eagle3_pipeline.stages.identity import BASELINE, DRAFT_CHECKPOINT, DRAFT_EVALUATION

_LOADS = "loads_in_vllm"
_LOSSLESS = "lossless"
_AGREES = "served_agrees_with_simulated"


def build_draft_evaluation(spec: PipelineSpec) -> dg.AssetsDefinition:
    """Unpartitioned: measures one draft."""

    @dg.asset(
        **asset_arguments(spec, DRAFT_EVALUATION, {"vllm"}),
        deps=[asset_key(spec, DRAFT_CHECKPOINT), asset_key(spec, BASELINE)],
        check_specs=[
            check_spec(spec, DRAFT_EVALUATION, _LOADS, "vLLM loaded the draft and drafted with it."),
            check_spec(spec, DRAFT_EVALUATION, _LOSSLESS, "Answers equal the undrafted ones, near-ties apart."),
            check_spec(
                spec, DRAFT_EVALUATION, _AGREES, "Accepted tokens per draft step, served and teacher-forced, agree."
            ),
        ],
        pool=GPU_POOL,
        description="Acceptance length, acceptance by position, tokens/s with and without the draft, by category.",
    )
    def draft_evaluation(
        context: dg.AssetExecutionContext, home: PipelineHome, gpu_pool: GpuPool
    ) -> dg.MaterializeResult:
        with stage_context(context, spec, home, gpu_pool) as stage:
            result = materialise_evaluation(stage)
        metrics = result.manifest.metrics
        different = metrics["num_differences"] - metrics["num_near_ties"]
        counts = [metrics[f"{name}_accepted_per_draft"] for name in ("served", "simulated")]
        same = agrees(counts[0], counts[1], metrics["num_drafts"], spec.evaluation.simulation_tolerance)
        checks = [
            check(spec, DRAFT_EVALUATION, _AGREES, same, served=counts[0], simulated=counts[1]),
            check(spec, DRAFT_EVALUATION, _LOADS, metrics["num_drafts"] > 0, num_drafts=metrics["num_drafts"]),
            check(spec, DRAFT_EVALUATION, _LOSSLESS, different == 0, num_differences=metrics["num_differences"]),
        ]
        report = dg.MetadataValue.md(result.artifact.path(REPORT).read_text())
        return stage_output(spec, DRAFT_EVALUATION, result, checks, {"report": report})

    return draft_evaluation
