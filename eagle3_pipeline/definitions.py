"""The Dagster code location: one call per enabled pipeline. Imports neither torch nor vLLM."""

import logging
import os

import dagster as dg

from eagle3_pipeline.assets.baseline import build_baseline
from eagle3_pipeline.assets.checks import build_up_to_date
from eagle3_pipeline.assets.console import short_console
from eagle3_pipeline.assets.dataset import build_dataset
from eagle3_pipeline.assets.draft_checkpoint import build_draft_checkpoint
from eagle3_pipeline.assets.draft_evaluation import build_draft_evaluation
from eagle3_pipeline.assets.failures import build_failure_report
from eagle3_pipeline.assets.jobs import build_jobs
from eagle3_pipeline.assets.published_draft import build_published_draft
from eagle3_pipeline.assets.resources import GpuPool, PipelineHome
from eagle3_pipeline.assets.schedules import build_nightly_retrain
from eagle3_pipeline.assets.sensors import build_new_chunks, build_retrain_when_ready, build_staleness
from eagle3_pipeline.assets.source_rows import build_source_rows
from eagle3_pipeline.assets.verifier import build_verifier
from eagle3_pipeline.assets.verifier_outputs import build_verifier_outputs
from eagle3_pipeline.assets.vocab_map import build_vocab_map
from eagle3_pipeline.config import PipelineSpec, load_enabled
from eagle3_pipeline.errors import ConfigError

_BUILDERS = (
    build_source_rows,
    build_verifier,
    build_dataset,
    build_verifier_outputs,
    build_vocab_map,
    build_baseline,
    build_draft_checkpoint,
    build_draft_evaluation,
    build_published_draft,
)

_SENSORS = (build_new_chunks, build_staleness, build_retrain_when_ready)


def _executor() -> dg.ExecutorDefinition:
    """`EAGLE3_EXECUTOR`: in_process (default) or multiprocess.

    A run of one chunk is one step, so a process for the step would cost a second import of everything, and would go on
    when its run is killed.
    """
    executors = {"in_process": dg.in_process_executor, "multiprocess": dg.multiprocess_executor}
    name = os.environ.get("EAGLE3_EXECUTOR", "in_process")
    if name not in executors:
        raise ConfigError(f"EAGLE3_EXECUTOR is {name!r}; allowed: {', '.join(executors)}")
    return executors[name]


def build_definitions(specs: list[PipelineSpec]) -> dg.Definitions:
    """All assets, jobs, sensors and schedules of these pipelines, side by side."""
    return dg.Definitions(
        assets=[build(spec) for spec in specs for build in _BUILDERS],
        asset_checks=[check for spec in specs for check in build_up_to_date(spec)],
        jobs=[job for spec in specs for job in build_jobs(spec)],
        schedules=[build_nightly_retrain(spec) for spec in specs],
        sensors=[build(spec) for spec in specs for build in _SENSORS] + [build_failure_report(specs)],
        resources={"home": PipelineHome(), "gpu_pool": GpuPool()},
        loggers={"console": short_console},
        executor=_executor(),
    )


def _enabled_definitions() -> dg.Definitions:
    """Those of the enabled pipelines that can be loaded; the others are named in the log."""
    specs, broken = load_enabled()
    for name, reason in broken.items():
        logging.getLogger(__name__).warning("pipeline %s is enabled (EAGLE3_ENABLED) and left out: %s", name, reason)
    return build_definitions(specs)


defs = _enabled_definitions()
