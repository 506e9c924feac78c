"""`verifier`: the resolved verifier snapshot."""

import dagster as dg

from eagle3_pipeline.assets.common import asset_arguments, stage_context, stage_output
from eagle3_pipeline.assets.resources import PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.identity import VERIFIER
from eagle3_pipeline.stages.verifier import materialise_verifier


def build_verifier(spec: PipelineSpec) -> dg.AssetsDefinition:
    """Unpartitioned; its data version is the content of the model's files."""

    @dg.asset(
        **asset_arguments(spec, VERIFIER, {"huggingface"}),
        description="The verifier's files, checked for completeness, and its geometry. Data version: their content.",
    )
    def verifier(context: dg.AssetExecutionContext, home: PipelineHome) -> dg.MaterializeResult:
        with stage_context(context, spec, home) as stage:
            return stage_output(spec, VERIFIER, materialise_verifier(stage))

    return verifier
