"""Runs what a plan asks for: in this process, or by the daemon of the running instance."""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Protocol

import dagster as dg

from eagle3_pipeline.assets.common import asset_key
from eagle3_pipeline.assets.daemon import ThroughDaemon, daemon_runs
from eagle3_pipeline.assets.jobs import UPDATE, job_name
from eagle3_pipeline.assets.partitions import publish_chunks
from eagle3_pipeline.assets.runs import process_tag, run_tags, was_interrupted
from eagle3_pipeline.assets.work import Work, next_work, passes
from eagle3_pipeline.config import PipelineSpec, enabled_names, project_home
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.planning import Plan, plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.templates import prompt_rows
from eagle3_pipeline.store.atomic import storage_error

Log = Callable[[str], None]
_RUN_CONFIG = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}  # without it, no logger is made


@dataclass
class Launched:
    """What was run."""

    num_runs: int = 0
    num_engine_starts: int = 0


@dataclass(frozen=True)
class Selection:
    """A part of a plan.

    Attributes:
        stages: names; empty: all.
        chunks: a pattern of chunk keys such as `00001*`; unpartitioned stages are selected by `*` only.
    """

    stages: Collection[str] = ()
    chunks: str = "*"

    def plan(self, whole: Plan) -> Plan:
        """The plan without what is not selected."""
        rows = [
            row
            for row in whole.rows
            if (not self.stages or row.stage in self.stages)
            and (fnmatch(row.chunk, self.chunks) if row.chunk else self.chunks == "*")
        ]
        return replace(whole, rows=rows)


class Runner(Protocol):
    """Executes runs and waits for them."""

    instance: dg.DagsterInstance

    def run(self, spec: PipelineSpec, work: list[Work]) -> None:
        """Raises `Eagle3Error` if one fails."""


class InProcess:
    """Runs in this process, one after the other; a chunk that fails does not keep the others from being tried."""

    def __init__(self, definitions: dg.Definitions, instance: dg.DagsterInstance, log: Log) -> None:
        self.instance = instance
        self._definitions = definitions
        self._log = log

    def run(self, spec: PipelineSpec, work: list[Work]) -> None:
        """Executes them in order."""
        with _caught_signals() as interrupted:
            self._run(spec, work, interrupted)

    def _run(self, spec: PipelineSpec, work: list[Work], interrupted: Callable[[], bool]) -> None:
        failures: list[str] = []
        job = self._definitions.resolve_job_def(job_name(spec, UPDATE))
        for number, item in enumerate(work, 1):
            self._log(f"{spec.name}: {item.text}" + (f" ({number} of {len(work)})" if len(work) > 1 else ""))
            result = job.execute_in_process(
                run_config=_RUN_CONFIG,
                instance=self.instance,
                partition_key=item.chunk or None,
                asset_selection=[asset_key(spec, stage) for stage in item.stages],
                tags=run_tags(spec, item) | process_tag(),
                raise_on_error=False,
            )
            if not result.success:
                reason, was_stopped = _failure(result)
                failures.append(f"run {result.run_id} ({item.text}) failed: {reason}")
                if was_stopped:
                    break
                # The first one is raised as a whole; all that an engine's death failed have the same log to show.
                head, *log = failures[-1].splitlines()
                told = "\n".join(failures[:-1] or failures).splitlines()
                self._log("\n".join([f"{spec.name}: {head}", *(line for line in log if line not in told)]))
            if interrupted():
                raise Eagle3Error(f"{spec.name}: interrupted after {item.text}; run it again, and it continues")
        if failures:
            raise Eagle3Error(f"{spec.name}: {len(failures)} of {len(work)} runs failed; first: {failures[0]}")


@contextlib.contextmanager
def _caught_signals() -> Iterator[Callable[[], bool]]:
    """Whether somebody wants this process to end.

    Dagster takes SIGINT and SIGTERM while it executes a run, and forgets those that come between steps.
    """
    received, sent = socket.socketpair()
    with received, sent:
        received.setblocking(False)
        sent.setblocking(False)
        before = signal.set_wakeup_fd(sent.fileno(), warn_on_full_buffer=False) if _is_main_thread() else None

        def interrupted() -> bool:
            with contextlib.suppress(BlockingIOError):
                return any(number in (signal.SIGINT, signal.SIGTERM) for number in received.recv(4096))
            return False

        try:
            yield interrupted
        finally:
            if before is not None:
                signal.set_wakeup_fd(before)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def choose_runner(
    spec: PipelineSpec, definitions: dg.Definitions, instance: dg.DagsterInstance, log: Log, in_process: bool = False
) -> Runner:
    """The daemon of the running instance if there is one and it knows the pipeline; else this process."""
    if not in_process and daemon_runs(instance):
        if spec.name in enabled_names():
            return ThroughDaemon(instance, log)
        log(f"{spec.name} is not in EAGLE3_ENABLED, so the daemon does not know it; it runs in this process")
    return InProcess(definitions, instance, log)


def dagster_home() -> Path:
    """`EAGLE3_HOME/dagster_home`, made on first use, with the checkout's dagster.yaml linked into it."""
    home = project_home() / "dagster_home"
    settings = Path(__file__).parents[2] / "dagster.yaml"
    link = home / "dagster.yaml"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if settings.exists() and not link.exists():
            link.unlink(missing_ok=True)
            link.symlink_to(settings)
    except OSError as error:
        raise storage_error(error, home) from error
    return home


def open_instance() -> dg.DagsterInstance:
    """The instance that `make dev` shows."""
    home = str(dagster_home())
    os.environ["DAGSTER_HOME"] = home
    return dg.DagsterInstance.from_config(home)


def sync_chunks(spec: PipelineSpec, instance: dg.DagsterInstance, log: Log) -> None:
    """Looks at the source, appends new chunks, shows changed ones as unsynced."""
    context = StageContext(spec, log)
    result = context.registry.sync(spec)
    publish_chunks(instance, spec, context.registry.chunks(), log)
    gone = f", {len(result.gone)} gone from the source" if result.gone else ""
    log(
        f"{spec.name}: {len(result.added)} chunks added, {len(result.changed)} changed, "
        f"{len(result.unchanged)} unchanged{gone}"
    )


def materialise_stale(spec: PipelineSpec, runner: Runner, log: Log, selection: Selection | None = None) -> Launched:
    """Runs what is not fresh: the verifier, the chunks, then the unpartitioned stages.

    Raises:
        Eagle3Error: a run failed.
    """
    context, selection = StageContext(spec, log), selection or Selection()
    context.all_chunks()
    context.registry.require_synced(spec)
    _check_evaluation(context, selection.plan(plan(context)))
    # An instance that lost its partitions, or never had them, gets them back.
    publish_chunks(runner.instance, spec, context.registry.chunks(), log)
    launched, before = Launched(), len(context.engines.starts())
    done: set[Work] = set()
    while work := _selected(context, selection):
        if again := [item for item in work if item in done]:
            raise Eagle3Error(f"{spec.name}: {again[0].text} is not fresh although its run succeeded; see eagle3 plan")
        runner.run(spec, work)
        done |= set(work)
        launched.num_runs += len(work)
    launched.num_engine_starts = len(context.engines.starts()) - before
    return launched


def _check_evaluation(context: StageContext, found: Plan) -> None:
    """Prompts that do not fit are told before the chunks are paid for, not after.

    Raises:
        ConfigError: names the first of them.
    """
    if any(row.stage == ids.BASELINE and row.to_run for row in found.rows):
        prompt_rows(context)


def _selected(context: StageContext, selection: Selection) -> list[Work]:
    return next_work(selection.plan(plan(context)), passes(context))


def _failure(result: dg.ExecuteInProcessResult) -> tuple[str, bool]:
    """Why a run failed, and whether somebody interrupted it."""
    failures = [event for event in result.all_events if event.is_step_failure]
    if not failures:
        return "see the run's log", False
    data = failures[0].step_failure_data
    if data.user_failure_data and data.user_failure_data.description:
        return data.user_failure_data.description, False
    error = data.error
    if error is None or was_interrupted(data):
        return "it was interrupted; run it again, and it continues", True
    while error.cause:
        error = error.cause
    return f"{error.message.strip()} (the run's log in the Dagster UI has the traceback)", False
