"""`baseline`: the undrafted verifier on the evaluation prompts."""

import dagster as dg

from eagle3_pipeline.assets.common import GPU_POOL, asset_arguments, asset_key, stage_context, stage_output
from eagle3_pipeline.assets.resources import GpuPool, PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.baseline import materialise_baseline
from eagle3_pipeline.stages.identity import BASELINE, VERIFIER


def build_baseline(spec: PipelineSpec) -> dg.AssetsDefinition:
    """Unpartitioned; cached per verifier and prompts, so that a new draft costs one load."""

    @dg.asset(
        **asset_arguments(spec, BASELINE, {"vllm"}),
        deps=[asset_key(spec, VERIFIER)],
        pool=GPU_POOL,
        description="Greedy answers to the evaluation prompts without a draft: token ids, tokens/s, hidden states.",
    )
    def baseline(context: dg.AssetExecutionContext, home: PipelineHome, gpu_pool: GpuPool) -> dg.MaterializeResult:
        with stage_context(context, spec, home, gpu_pool) as stage:
            return stage_output(spec, BASELINE, materialise_baseline(stage))

    return baseline
