"""A real `dagster dev` (web server and daemon) for tests and benchmarks."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).parents[1]
_START_S = 120.0
_LAUNCH = """
mutation($params: LaunchBackfillParams!) {
  launchPartitionBackfill(backfillParams: $params) {
    __typename
    ... on LaunchBackfillSuccess { backfillId }
    ... on PythonError { message }
    ... on PartitionKeysNotFoundError { message }
  }
}
"""
_STATUS = """
query($id: String!) {
  partitionBackfillOrError(backfillId: $id) { __typename ... on PartitionBackfill { status } }
}
"""


class DagsterDev:
    """The running server."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        """Runs a GraphQL query and returns its data."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(f"{self.url}/graphql", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)
        assert "errors" not in found, found
        return found["data"]

    def backfill(self, pipeline: str, stages: Sequence[str], chunks: Sequence[str]) -> str:
        """Launches one run per chunk, as the UI does; returns the backfill's id."""
        selection = [{"path": [pipeline, stage]} for stage in stages]
        params = {"assetSelection": selection, "partitionNames": list(chunks)}
        launched = self.graphql(_LAUNCH, params=params)["launchPartitionBackfill"]
        assert launched["__typename"] == "LaunchBackfillSuccess", launched
        return launched["backfillId"]

    def wait(self, backfill: str, timeout_s: float) -> str:
        """Waits for the end of a backfill; returns its status."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            status = self.graphql(_STATUS, id=backfill)["partitionBackfillOrError"]["status"]
            if status not in ("REQUESTED", "CANCELING"):
                return status
            time.sleep(1.0)
        raise TimeoutError(f"backfill {backfill} is not done after {timeout_s} s")


@contextlib.contextmanager
def dagster_dev(environment: dict[str, str], log: Path) -> Iterator[DagsterDev]:
    """Starts `dagster dev` on a free port; ends it and all its runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dagster", "dev", "-w", str(REPOSITORY / "workspace.yaml"), "-p", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        server = DagsterDev(port)
        _wait_until_up(server, process, log)
        yield server
    finally:
        _end(process)


def _wait_until_up(server: DagsterDev, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, AssertionError):
            nodes = server.graphql("{assetNodes {assetKey {path}}}")["assetNodes"]
            if nodes:
                return
        time.sleep(0.5)
    raise RuntimeError(f"dagster dev did not come up:\n{log.read_text()[-3000:]}")


def _end(process: subprocess.Popen) -> None:
    """`dagster dev` ends its children on SIGINT; what is left of its session is killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()
