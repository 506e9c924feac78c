"""Opens engines for stages: what cannot succeed is refused before the load."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.preflight import Check
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import PreflightError
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.preflight import engine_checks, pipeline_checks
from eagle3_pipeline.store.atomic import exclusive


def open_engine(context: StageContext, engine: EngineSpec, after_chunks: bool = False) -> EngineClient:
    """A connection to an engine; a new one is checked before it loads, and takes over sooner `after_chunks`.

    Raises:
        PreflightError: it cannot succeed; every failing line is named.
        EngineError: it does not start.
    """

    def check(chosen: EngineSpec) -> None:
        _require([*pipeline_checks(context), *engine_checks(context, chosen, context.verifier)])
        if context.spec.resources.dummy_load:
            context.engines.rehearse(chosen, context.log, after_chunks)

    return context.engines.acquire(engine, context.log, check, after_chunks)


class Passes(NamedTuple):
    """How answers and states are made.

    Attributes:
        together: answers come from the engine that captures, with their states.
        num_engine_starts: of the engine that was asked.
        engine_wait_s: seconds that this took.
    """

    together: bool
    num_engine_starts: float = 0.0
    engine_wait_s: float = 0.0

    def add_to(self, speed: dict[str, float]) -> dict[str, float]:
        """What `run_prompts` tells of its engine, with the start that came before."""
        return speed | {name: speed[name] + getattr(self, name) for name in ("num_engine_starts", "engine_wait_s")}


def choose_passes(context: StageContext, sampled: bool) -> Passes:
    """Whether answers may come from the engine that captures, with their states; where not, the log says why.

    An engine that does not run is started, to be asked, unless its last start said no.

    Args:
        context: the pipeline.
        sampled: whether answers are sampled, not greedy.

    Raises:
        PreflightError, EngineError: as `open_engine`.
    """
    engine = context.capturing_engine_spec()
    why = context.engines.distrusted(engine) or _decoding_fault(context.engines.last_smoke(engine), sampled)
    starts = waited = 0.0
    if not why:
        with open_engine(context, engine) as client:
            why, starts, waited = _decoding_fault(client.smoke, sampled), float(client.started), client.waited_s
    if why:
        context.log(f"answers and states are made in two passes, by two engines: {why}")
    return Passes(not why, starts, waited)


def _decoding_fault(smoke: dict[str, Any], sampled: bool) -> str:
    if fault := smoke.get("decoding_fault", ""):
        return str(fault)
    garbage = sampled and not smoke.get("may_sample", True)
    return "this engine samples garbage while it captures" if garbage else ""


@contextlib.contextmanager
def timed_engine(context: StageContext, engine: EngineSpec) -> Iterator[EngineClient]:
    """An engine whose speed is measured: it answers for one pipeline at a time, and does not retire in between.

    Raises:
        PreflightError, EngineError: as `open_engine`.
    """
    lock, what = context.engines.folder / f"{engine.engine_id}.timing", f"the timing of {engine.describe()}"
    with (
        exclusive(lock, what, wait=True, on_wait=context.log),
        open_engine(context, engine, after_chunks=True) as client,
    ):
        yield client


def _require(checks: list[Check]) -> None:
    """Refuses a load that cannot succeed.

    Raises:
        PreflightError: every failing line.
    """
    failed = [check.line() for check in checks if not check.passed]
    if failed:
        raise PreflightError("the engine is not started:\n" + "\n".join(failed))
