"""What all asset modules share: keys, metadata, errors."""

import contextlib
from collections.abc import Iterator
from typing import Any

import dagster as dg

from eagle3_pipeline.assets.resources import GpuPool, PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import Eagle3Error, EngineRefusedError
from eagle3_pipeline.stages.context import StageContext, StageResult
from eagle3_pipeline.stages.identity import code_version
from eagle3_pipeline.store.manifest import Manifest

GPU_POOL = "gpu"
OWNERS = ["team:drafting"]
SOURCE_ROWS = "source_rows"
PIPELINE_TAG = "eagle3/pipeline"
SPEC_TAG = "eagle3/spec_hash"
# Metadata `error` of a step that was refused because the pipeline file was edited.
EDITED = "EditedPipeline"
# Metadata of a step that was refused because an engine failed before: the engine's folder.
REFUSED_BY = "engine"


def asset_key(spec: PipelineSpec, stage: str) -> dg.AssetKey:
    """`[pipeline, stage]`."""
    return dg.AssetKey([spec.name, stage])


def asset_arguments(spec: PipelineSpec, stage: str, kinds: set[str]) -> dict[str, Any]:
    """Keyword arguments that every asset (spec) of a pipeline takes."""
    return {
        "key": asset_key(spec, stage),
        "group_name": spec.name,
        "code_version": code_version(spec, stage),
        "kinds": kinds,
        "owners": OWNERS,
    }


@contextlib.contextmanager
def stage_context(
    context: dg.AssetExecutionContext, spec: PipelineSpec, home: PipelineHome, gpu_pool: GpuPool | None = None
) -> Iterator[StageContext]:
    """The stage's context; our errors become Dagster failures whose description is the whole message."""
    _require_unedited(context, spec)
    try:
        num_gpus = gpu_pool.num_gpus if gpu_pool else None
        yield StageContext(spec, log=context.log.info, home=home.path(), num_gpus=num_gpus)
    except Eagle3Error as error:
        metadata = {"error": type(error).__name__}
        if isinstance(error, EngineRefusedError):
            metadata[REFUSED_BY] = str(error.folder)
        raise dg.Failure(description=str(error), metadata=metadata) from error


def _require_unedited(context: dg.AssetExecutionContext, spec: PipelineSpec) -> None:
    """A step reads the pipeline file again; it must be the one that the run was launched with."""
    launched_with = context.run.tags.get(SPEC_TAG)
    if launched_with and launched_with != spec.spec_hash():
        raise dg.Failure(
            description=f"{spec.name}: the pipeline file, or the code that reads it, was edited after this run was "
            f"launched: settings {launched_with} then, {spec.spec_hash()} now; reload the code location and launch the "
            "run again",
            metadata={"error": EDITED},
        )


def manifest_metadata(manifest: Manifest, recomputed: bool) -> dict[str, Any]:
    """Numeric metadata of an artifact: its metrics, rejected rows by reason, bytes, seconds, where it came from."""
    metadata: dict[str, Any] = dict(manifest.metrics)
    metadata |= {f"rejected_{reason}": count for reason, count in manifest.rejected.items()}
    metadata["artifact_bytes"] = manifest.size_bytes
    metadata["wall_s"] = manifest.wall_s
    metadata["recomputed"] = recomputed
    metadata["fingerprint"] = manifest.fingerprint
    return metadata


def stage_output(
    spec: PipelineSpec,
    stage: str,
    result: StageResult,
    checks: list[dg.AssetCheckResult] | None = None,
    extra: dict[str, Any] | None = None,
) -> dg.MaterializeResult:
    """The Dagster result of a stage: data version, metadata, checks."""
    metadata = manifest_metadata(result.manifest, result.recomputed) | (extra or {})
    metadata["folder"] = dg.MetadataValue.path(str(result.artifact.folder))
    return dg.MaterializeResult(
        asset_key=asset_key(spec, stage),
        data_version=dg.DataVersion(result.manifest.content_id),
        metadata=metadata,
        check_results=checks or [],
    )


def check(spec: PipelineSpec, stage: str, name: str, passed: bool, **metadata: float) -> dg.AssetCheckResult:
    """An inline check's result."""
    return dg.AssetCheckResult(
        asset_key=asset_key(spec, stage), check_name=name, passed=passed, metadata=dict(metadata)
    )


def check_spec(spec: PipelineSpec, stage: str, name: str, description: str) -> dg.AssetCheckSpec:
    """An inline check's declaration."""
    return dg.AssetCheckSpec(name=name, asset=asset_key(spec, stage), description=description)
