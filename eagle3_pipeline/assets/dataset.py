"""`dataset`: normalised conversations of a chunk."""

import dagster as dg

from eagle3_pipeline.assets.common import asset_arguments, asset_key, stage_context, stage_output
from eagle3_pipeline.assets.partitions import chunk_partitions
from eagle3_pipeline.assets.resources import PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.identity import DATASET


def build_dataset(spec: PipelineSpec) -> dg.AssetsDefinition:
    """One partition per chunk."""

    @dg.asset(
        **asset_arguments(spec, DATASET, {"parquet"}),
        partitions_def=chunk_partitions(spec),
        deps=[asset_key(spec, "source_rows")],
        description="Normalised conversations (samples) and the rejected rows, each with its reason.",
    )
    def dataset(context: dg.AssetExecutionContext, home: PipelineHome) -> dg.MaterializeResult:
        with stage_context(context, spec, home) as stage:
            return stage_output(spec, DATASET, materialise_dataset(stage, context.partition_key))

    return dataset
