"""Opens engines for stages: what cannot fit is refused before the load."""

from eagle3_pipeline.data.verifier import Verifier
from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.devices import gpu_memory
from eagle3_pipeline.engine.preflight import Check, check_cpu_memory, check_gpu_fit, check_gpus
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import PreflightError
from eagle3_pipeline.stages.context import StageContext


def open_engine(context: StageContext, engine: EngineSpec) -> EngineClient:
    """A connection to an engine; a new one is checked before it loads.

    Raises:
        PreflightError: it cannot succeed; every failing line is named.
        EngineError: it does not start.
    """

    def check() -> None:
        # What fails for want of a file, a layer or a template raises where the stage reads it, before this.
        _require(engine_checks(context, engine, context.verifier))
        if context.spec.resources.dummy_load:
            context.engines.rehearse(engine, context.log)

    return context.engines.acquire(engine, context.log, before_start=check)


def engine_checks(context: StageContext, engine: EngineSpec, verifier: Verifier) -> list[Check]:
    """Checks of devices and memory for one engine."""
    if not engine.num_gpus:
        return [check_cpu_memory(engine, verifier.weight_bytes)]
    gpus = gpu_memory()
    # While engines or trainings of ours hold devices, memory that is not free now may be when the lease is.
    ours = any(context.engines.pool.holders().values())
    checks = check_gpus(engine.num_gpus, gpus, 0.0 if ours else engine.gpu_memory_utilization)
    if len(gpus) >= engine.num_gpus:
        checks.append(check_gpu_fit(engine, verifier.weight_bytes, verifier.kv_bytes_per_token, gpus))
    return checks


def _require(checks: list[Check]) -> None:
    """Refuses a load that cannot succeed.

    Raises:
        PreflightError: every failing line.
    """
    failed = [check.line() for check in checks if not check.passed]
    if failed:
        raise PreflightError("the engine is not started:\n" + "\n".join(failed))
