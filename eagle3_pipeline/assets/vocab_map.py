"""`vocab_map`: the draft vocabulary."""

import dagster as dg

from eagle3_pipeline.assets.common import asset_arguments, asset_key, check, check_spec, stage_context, stage_output
from eagle3_pipeline.assets.resources import PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.identity import SYNTHETIC_GENERATIONS, VERIFIER, VOCAB_MAP
from eagle3_pipeline.stages.vocab_map import materialise_vocab_map

_COVERAGE = "coverage"


def build_vocab_map(spec: PipelineSpec) -> dg.AssetsDefinition:
    """Unpartitioned: aggregates all chunks."""

    @dg.asset(
        **asset_arguments(spec, VOCAB_MAP, {"safetensors"}),
        deps=[asset_key(spec, SYNTHETIC_GENERATIONS), asset_key(spec, VERIFIER)],
        check_specs=[check_spec(spec, VOCAB_MAP, _COVERAGE, "Share of supervised tokens in the draft vocabulary.")],
        description="t2d bool[V], d2t int64[D] offsets, from the supervised-token counts of all chunks.",
    )
    def vocab_map(context: dg.AssetExecutionContext, home: PipelineHome) -> dg.MaterializeResult:
        with stage_context(context, spec, home) as stage:
            result = materialise_vocab_map(stage)
        coverage = result.manifest.metrics["coverage"]
        passed = check(spec, VOCAB_MAP, _COVERAGE, coverage >= spec.vocab.min_coverage, coverage=coverage)
        return stage_output(spec, VOCAB_MAP, result, [passed])

    return vocab_map
