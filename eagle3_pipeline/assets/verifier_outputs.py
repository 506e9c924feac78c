"""`synthetic_generations` and `hidden_states`: both in one pass, or either alone."""

from collections.abc import Iterator

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
from eagle3_pipeline.assets.partitions import chunk_partitions
from eagle3_pipeline.assets.resources import GpuPool, PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.identity import DATASET, HIDDEN_STATES, SYNTHETIC_GENERATIONS, VERIFIER
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs

_SUPERVISED = "has_supervised_tokens"
_FINITE = "states_are_finite"


def build_verifier_outputs(spec: PipelineSpec) -> dg.AssetsDefinition:
    """A subsettable multi-asset, one partition per chunk, behind the GPU pool."""
    generations, states = asset_key(spec, SYNTHETIC_GENERATIONS), asset_key(spec, HIDDEN_STATES)
    verifier = asset_key(spec, VERIFIER)

    @dg.multi_asset(
        name=f"{spec.name}__verifier_outputs",
        specs=[
            dg.AssetSpec(
                **asset_arguments(spec, SYNTHETIC_GENERATIONS, {"vllm", "parquet"}),
                deps=[asset_key(spec, DATASET), verifier],
                description="Training sequences: token ids as sampled, loss masks, text, supervised-token counts.",
            ),
            dg.AssetSpec(
                **asset_arguments(spec, HIDDEN_STATES, {"vllm", "safetensors"}),
                deps=[generations, verifier],
                description="The verifier's hidden states of every token: [T, A+1, H] bf16 in safetensors shards.",
            ),
        ],
        check_specs=[
            check_spec(spec, SYNTHETIC_GENERATIONS, _SUPERVISED, "Some token of the chunk is trained on."),
            check_spec(spec, HIDDEN_STATES, _FINITE, "All states are finite, none is all zero, every layer varies."),
        ],
        partitions_def=chunk_partitions(spec),
        can_subset=True,
        pool=GPU_POOL,
    )
    def verifier_outputs(
        context: dg.AssetExecutionContext, home: PipelineHome, gpu_pool: GpuPool
    ) -> Iterator[dg.MaterializeResult]:
        selected = context.selected_asset_keys
        with stage_context(context, spec, home, gpu_pool) as stage:
            made = materialise_outputs(stage, context.partition_key, generations in selected, states in selected)
        if made.generations:
            count = made.generations.manifest.metrics["num_supervised_tokens"]
            passed = check(spec, SYNTHETIC_GENERATIONS, _SUPERVISED, count > 0, num_supervised_tokens=count)
            yield stage_output(spec, SYNTHETIC_GENERATIONS, made.generations, [passed])
        if made.hidden_states:
            variances = {k: v for k, v in made.hidden_states.manifest.metrics.items() if k.endswith("_variance")}
            lowest = min(variances.values())
            passed = check(spec, HIDDEN_STATES, _FINITE, lowest >= spec.capture.min_layer_variance, **variances)
            yield stage_output(spec, HIDDEN_STATES, made.hidden_states, [passed])

    return verifier_outputs
