"""Partitions: one dynamic definition per pipeline, one key per sample chunk."""

import time
from collections.abc import Callable

import dagster as dg

from eagle3_pipeline.assets.common import SOURCE_ROWS, asset_key
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.registry import Chunk

_VERSION_TAG = "dagster/data_version"
_REPORT_EVERY_S = 10.0


def partitions_name(spec: PipelineSpec) -> str:
    """Name of the pipeline's dynamic partitions."""
    return f"{spec.name}_chunks"


def chunk_partitions(spec: PipelineSpec) -> dg.DynamicPartitionsDefinition:
    """The pipeline's chunks. Two assets map one to one only through an equal definition."""
    return dg.DynamicPartitionsDefinition(name=partitions_name(spec))


def unpublished_chunks(
    instance: dg.DagsterInstance, spec: PipelineSpec, chunks: list[Chunk]
) -> tuple[set[str], list[Chunk]]:
    """Keys that are no partitions yet, and the chunks whose content `source_rows` does not show."""
    known = set(instance.get_dynamic_partitions(partitions_name(spec)))
    tags = instance.event_log_storage.get_latest_tags_by_partition(
        asset_key(spec, SOURCE_ROWS), dg.DagsterEventType.ASSET_OBSERVATION, [_VERSION_TAG]
    )
    stale = [c for c in chunks if c.key not in known or tags.get(c.key, {}).get(_VERSION_TAG) != c.content_id]
    return {chunk.key for chunk in chunks} - known, stale


def observation(spec: PipelineSpec, chunk: Chunk) -> dg.AssetObservation:
    """What makes Dagster compare a chunk's rows with those that its artifacts were made of."""
    return dg.AssetObservation(
        asset_key=asset_key(spec, SOURCE_ROWS),
        partition=chunk.key,
        metadata={"file": chunk.file, "row_start": chunk.row_start, "num_rows": chunk.num_rows},
        tags={_VERSION_TAG: chunk.content_id},
    )


def publish_chunks(
    instance: dg.DagsterInstance,
    spec: PipelineSpec,
    chunks: list[Chunk],
    log: Callable[[str], None] = lambda _line: None,
) -> list[str]:
    """Adds missing partition keys and observes `source_rows` where its content is new; returns the observed keys."""
    missing, stale = unpublished_chunks(instance, spec, chunks)
    if missing:
        instance.add_dynamic_partitions(partitions_name(spec), sorted(missing))
    next_report = time.monotonic() + _REPORT_EVERY_S
    for number, chunk in enumerate(stale):
        if time.monotonic() >= next_report:
            next_report += _REPORT_EVERY_S
            log(f"{spec.name}: {number} of {len(stale)} chunks told to Dagster")
        instance.report_runless_asset_event(observation(spec, chunk))
    return [chunk.key for chunk in stale]
