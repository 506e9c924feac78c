"""Hands runs to the daemon of the running instance, as the web UI does, and waits for them."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from dagster import DagsterRunStatus, RunsFilter

from eagle3_pipeline.assets.jobs import UPDATE, job_name
from eagle3_pipeline.assets.runs import PARTITION_TAG, UNFINISHED, failure_reason, first_step_failure, run_tags
from eagle3_pipeline.assets.work import Work
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import Eagle3Error

_QUEUE_DAEMON = "QUEUED_RUN_COORDINATOR"
# Daemons report every 30 s.
_ALIVE_S = 75.0
_POLL_S = 1.0
_REPORT_EVERY_S = 10.0
_WORKSPACE = Path(__file__).parents[2] / "workspace.yaml"
_LAUNCH = """
mutation($runs: [ExecutionParams!]!) {
  launchMultipleRuns(executionParamsList: $runs) {
    __typename
    ... on PythonError { message }
    ... on LaunchMultipleRunsResult {
      launchMultipleRunsResult {
        __typename
        ... on LaunchRunSuccess { run { runId } }
        ... on PythonError { message }
        ... on PipelineNotFoundError { message }
        ... on InvalidSubsetError { message }
        ... on UnauthorizedError { message }
      }
    }
  }
}
"""


def daemon_runs(instance: dg.DagsterInstance) -> bool:
    """Whether a daemon takes runs from this instance's queue now."""
    heartbeat = instance.get_daemon_heartbeats().get(_QUEUE_DAEMON)
    return heartbeat is not None and time.time() - heartbeat.timestamp < _ALIVE_S


class ThroughDaemon:
    """Queues runs; the daemon starts as many at once as dagster.yaml allows."""

    def __init__(self, instance: dg.DagsterInstance, log: Callable[[str], None]) -> None:
        self.instance = instance
        self._log = log

    def run(self, spec: PipelineSpec, work: list[Work]) -> None:
        """Queues all and waits for the end of all.

        Raises:
            Eagle3Error: a run could not be queued, failed or was cancelled.
        """
        queued = dict(zip(self._queue(spec, work), work, strict=True))
        self._log(f"{spec.name}: {len(queued)} runs queued, first: {work[0].text}")
        try:
            ended = self._wait(spec, list(queued))
        except KeyboardInterrupt:
            self._log("The runs go on without this command; the Dagster UI shows them and can terminate them.")
            raise
        failed = {run: status for run, status in ended.items() if status is not DagsterRunStatus.SUCCESS}
        if failed:
            run, status = next(iter(failed.items()))
            raise Eagle3Error(
                f"{spec.name}: {len(failed)} of {len(queued)} runs did not succeed; first: run {run} "
                f"({queued[run].text}), {status.value}: "
                + (failure_reason(first_step_failure(self.instance, run)) or "see its log in the Dagster UI")
            )

    def _queue(self, spec: PipelineSpec, work: list[Work]) -> list[str]:
        from dagster_graphql.cli import execute_query

        with _workspace(self.instance) as workspace:
            location = next(iter(workspace.create_request_context().get_code_location_entries().values()))
            if location.load_error:
                raise Eagle3Error(f"the code location does not load: {location.load_error.message.strip()}")
            runs = [self._params(spec, item, location) for item in work]
            answer = execute_query(workspace, _LAUNCH, {"runs": runs})
        if "errors" in answer:
            raise Eagle3Error(f"{spec.name}: the runs cannot be queued: {answer['errors'][0]['message']}")
        result = answer["data"]["launchMultipleRuns"]
        results = result.get("launchMultipleRunsResult", [result])
        if refused := [one for one in results if one["__typename"] != "LaunchRunSuccess"]:
            reason = refused[0].get("message", refused[0]["__typename"])
            raise Eagle3Error(f"{spec.name}: {len(refused)} of {len(work)} runs cannot be queued: {reason}")
        return [one["run"]["runId"] for one in results]

    def _params(self, spec: PipelineSpec, work: Work, location: Any) -> dict[str, Any]:
        repository = next(iter(location.code_location.get_repositories()))
        tags = run_tags(spec, work) | ({PARTITION_TAG: work.chunk} if work.chunk else {})
        return {
            "selector": {
                "repositoryLocationName": location.origin.location_name,
                "repositoryName": repository,
                "jobName": job_name(spec, UPDATE),
                "assetSelection": [{"path": [spec.name, stage]} for stage in work.stages],
            },
            "executionMetadata": {"tags": [{"key": key, "value": value} for key, value in tags.items()]},
            "runConfigData": {},
        }

    def _wait(self, spec: PipelineSpec, runs: list[str]) -> dict[str, DagsterRunStatus]:
        started, next_report = time.monotonic(), time.monotonic() + _REPORT_EVERY_S
        while True:
            found = {run.run_id: run.status for run in self.instance.get_runs(RunsFilter(run_ids=runs))}
            open_runs = [run for run, status in found.items() if status in UNFINISHED]
            if not open_runs:
                return found
            if time.monotonic() >= next_report:
                next_report += _REPORT_EVERY_S
                if not daemon_runs(self.instance):
                    raise Eagle3Error(
                        f"{spec.name}: the Dagster daemon does not live any more; {len(open_runs)} of {len(runs)} runs "
                        "wait for it: start it again (make dev), or terminate them in the UI and run this again"
                    )
                self._log(_progress(spec, found, len(open_runs), time.monotonic() - started))
            time.sleep(_POLL_S)


@contextmanager
def _workspace(instance: dg.DagsterInstance) -> Iterator[Any]:
    from dagster._core.workspace.context import WorkspaceProcessContext
    from dagster._core.workspace.load_target import ModuleTarget, WorkspaceFileTarget

    module = ModuleTarget("eagle3_pipeline.definitions", None, None, "eagle3_pipeline")
    target = WorkspaceFileTarget([str(_WORKSPACE)]) if _WORKSPACE.exists() else module
    with WorkspaceProcessContext(instance, target, code_server_log_level="ERROR") as workspace:
        yield workspace


def _progress(spec: PipelineSpec, found: dict[str, DagsterRunStatus], num_open: int, elapsed_s: float) -> str:
    num_done = len(found) - num_open
    left = f", about {elapsed_s / num_done * num_open:.0f} s left" if num_done else ""
    counts = ", ".join(f"{n} {status.value.lower()}" for status, n in Counter(found.values()).items())
    return f"{spec.name}: {num_done} of {len(found)} runs ended after {elapsed_s:.0f} s{left} ({counts})"
