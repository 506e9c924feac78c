"""`draft_checkpoint`: the trained draft."""

import base64

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
from eagle3_pipeline.stages.draft_checkpoint import CURVES, materialise_checkpoint
from eagle3_pipeline.stages.identity import DRAFT_CHECKPOINT, HIDDEN_STATES, SYNTHETIC_GENERATIONS, VOCAB_MAP

_LEARNED = "better_than_untrained"
# Metadata lives in the event log: a large picture overflows some databases.
_LARGEST_THUMBNAIL_BYTES = 120_000


def build_draft_checkpoint(spec: PipelineSpec) -> dg.AssetsDefinition:
    """Unpartitioned: trains on all chunks."""

    @dg.asset(
        **asset_arguments(spec, DRAFT_CHECKPOINT, {"pytorch", "safetensors"}),
        deps=[asset_key(spec, stage) for stage in (SYNTHETIC_GENERATIONS, HIDDEN_STATES, VOCAB_MAP)],
        check_specs=[
            check_spec(
                spec, DRAFT_CHECKPOINT, _LEARNED, "Simulated acceptance length rose above the untrained draft's."
            )
        ],
        pool=GPU_POOL,
        description="The EAGLE-3 draft as a Hugging Face folder that vLLM serves, metrics.parquet, curves.png.",
    )
    def draft_checkpoint(
        context: dg.AssetExecutionContext, home: PipelineHome, gpu_pool: GpuPool
    ) -> dg.MaterializeResult:
        with stage_context(context, spec, home, gpu_pool) as stage:
            result = materialise_checkpoint(stage)
        metrics = result.manifest.metrics
        before, after = metrics["initial_val_acceptance_length"], metrics["val_acceptance_length"]
        passed = check(spec, DRAFT_CHECKPOINT, _LEARNED, after > before, untrained=before, trained=after)
        picture = result.artifact.path(CURVES).read_bytes()
        extra = {}
        if len(picture) <= _LARGEST_THUMBNAIL_BYTES:
            encoded = base64.b64encode(picture).decode()
            extra["curves"] = dg.MetadataValue.md(f"![curves](data:image/png;base64,{encoded})")
        return stage_output(spec, DRAFT_CHECKPOINT, result, [passed], extra)

    return draft_checkpoint
