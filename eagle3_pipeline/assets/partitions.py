"""Partitions: one dynamic definition per pipeline, one key per sample chunk."""

import dagster as dg

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.registry import Chunk


def partitions_name(spec: PipelineSpec) -> str:
    """Name of the pipeline's dynamic partitions."""
    return f"{spec.name}_chunks"


def chunk_partitions(spec: PipelineSpec) -> dg.DynamicPartitionsDefinition:
    """The pipeline's chunks. Two assets map one to one only through an equal definition."""
    return dg.DynamicPartitionsDefinition(name=partitions_name(spec))


def publish_chunks(instance: dg.DagsterInstance, spec: PipelineSpec, chunks: list[Chunk]) -> list[str]:
    """Adds missing partition keys and observes `source_rows` where its content is new; returns the observed keys."""
    known = set(instance.get_dynamic_partitions(partitions_name(spec)))
    missing = [chunk.key for chunk in chunks if chunk.key not in known]
    if missing:
        instance.add_dynamic_partitions(partitions_name(spec), missing)
    observed = []
    for chunk in chunks:
        if _observed_version(instance, spec, chunk.key) == chunk.content_id:
            continue
        instance.report_runless_asset_event(
            dg.AssetObservation(
                asset_key=[spec.name, "source_rows"],
                partition=chunk.key,
                metadata={"file": chunk.file, "row_start": chunk.row_start, "num_rows": chunk.num_rows},
                tags={"dagster/data_version": chunk.content_id},
            )
        )
        observed.append(chunk.key)
    return observed


def _observed_version(instance: dg.DagsterInstance, spec: PipelineSpec, key: str) -> str | None:
    asset = dg.AssetKey([spec.name, "source_rows"])
    records = instance.fetch_observations(
        dg.AssetRecordsFilter(asset_key=asset, asset_partitions=[key]), limit=1
    ).records
    observation = records[0].asset_observation if records else None
    return observation.tags.get("dagster/data_version") if observation else None
