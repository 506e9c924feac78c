"""`source_rows`: the external asset that stands for the chunk's rows in the source."""

import dagster as dg

from eagle3_pipeline.assets.common import OWNERS, SOURCE_ROWS, asset_key
from eagle3_pipeline.assets.partitions import chunk_partitions
from eagle3_pipeline.config import PipelineSpec


def build_source_rows(spec: PipelineSpec) -> dg.AssetSpec:
    """Observed by `eagle3 sync-chunks` and the sensor of new chunks; a changed file shows as a changed data version."""
    return dg.AssetSpec(
        key=asset_key(spec, SOURCE_ROWS),
        group_name=spec.name,
        partitions_def=chunk_partitions(spec),
        kinds={spec.dataset.source},
        owners=OWNERS,
        description="Rows of the source that a chunk holds: file, first row, number of rows.",
    )
