"""A day with a real daemon and the fake engine: data arrives, the night retrains, the next one has no reason to."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster import DagsterRunStatus

from eagle3_pipeline.assets.retrain import read_retrain
from eagle3_pipeline.assets.runs import RETRAIN_TAG, STAGES_TAG
from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.dagster_dev import DagsterDev, dagster_dev
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
NAME = "day"
_TICKS = """
query($selector: ScheduleSelector!) {
  scheduleOrError(scheduleSelector: $selector) {
    ... on Schedule { scheduleState { ticks(limit: 50) { status skipReason runIds error { message } } } }
  }
}
"""
_START_SCHEDULE = """
mutation($selector: ScheduleSelector!) {
  startSchedule(scheduleSelector: $selector) { __typename ... on PythonError { message } }
}
"""
_START_SENSOR = """
mutation($selector: SensorSelector!) {
  startSensor(sensorSelector: $selector) { __typename ... on PythonError { message } }
}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Six files of four rows, one chunk each; everything small enough to train in seconds."""
    for name in [name for name in os.environ if name.startswith(("EAGLE3_", "DAGSTER_"))]:
        monkeypatch.delenv(name)
    folder = tmp_path / "home"
    (folder / "pipelines").mkdir(parents=True)
    monkeypatch.setenv("EAGLE3_HOME", str(folder))
    monkeypatch.setenv("EAGLE3_PIPELINES", str(folder / "pipelines"))
    monkeypatch.setenv("EAGLE3_ENABLED", NAME)
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
    make_tiny_llama(folder / "tiny")
    (folder / "prompts.jsonl").write_text('{"category": "a", "prompt": "hi"}\n{"category": "b", "prompt": "you"}\n')
    pipeline = {
        "verifier": {"model": str(folder / "tiny")},
        "dataset": {"path": str(folder / "data" / "*.jsonl"), "samples_per_chunk": 4},
        "generation": {"max_new_tokens": 6, "max_sequence_tokens": 96},
        "capture": {"min_next_token_agreement": 0.0},
        "vocab": {"draft_vocab_size": 64, "min_coverage": 0.1},
        "training": {"epochs": 1, "batch_tokens": 96, "min_validation_samples": 1},
        "evaluation": {"prompts": str(folder / "prompts.jsonl"), "max_new_tokens": 8},
        "resources": {"num_gpus": 0, "idle_timeout_s": 600},
        "schedule": {"cron": "* * * * *"},
    }
    (folder / "pipelines" / f"{NAME}.yaml").write_text(yaml.safe_dump(pipeline))
    for number in range(6):
        write_file(folder, number)
    yield folder
    context().engines.stop_all(print)


def write_file(home: Path, number: int) -> None:
    (home / "data").mkdir(exist_ok=True)
    rows = [json.dumps({"prompt": f"question {number} {i}"}) + "\n" for i in range(4)]
    (home / "data" / f"{number:02d}.jsonl").write_text("".join(rows))


def context() -> StageContext:
    return StageContext(find_pipeline(NAME), print)


def eagle3(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_pipeline.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait(what: str, condition: Callable[[], Any], timeout_s: float = 300.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(1.0)
    raise TimeoutError(f"{what} did not happen within {timeout_s} s")


def selector(kind: str, name: str) -> dict[str, str]:
    return {"repositoryLocationName": "eagle3_pipeline", "repositoryName": "__repository__", f"{kind}Name": name}


def ticks(server: DagsterDev) -> list[dict[str, Any]]:
    """Ticks of the schedule, newest first."""
    found = server.graphql(_TICKS, selector=selector("schedule", f"{NAME}__nightly_retrain"))
    return found["scheduleOrError"]["scheduleState"]["ticks"]


def skipped(server: DagsterDev, count: int) -> bool:
    """Whether the newest `count` ticks were skipped for want of news."""
    reasons = [tick["skipReason"] or "" for tick in ticks(server)[:count]]
    return len(reasons) == count and all("nothing changed" in reason for reason in reasons)


def partitions(home: Path) -> list[str]:
    with dg.DagsterInstance.from_config(str(home / "dagster_home")) as instance:
        return list(instance.get_dynamic_partitions(f"{NAME}_chunks"))


def runs(home: Path) -> list[dg.DagsterRun]:
    with dg.DagsterInstance.from_config(str(home / "dagster_home")) as instance:
        return list(instance.get_runs())


def start(server: DagsterDev) -> None:
    """What README tells people to switch on."""
    found = server.graphql(_START_SCHEDULE, selector=selector("schedule", f"{NAME}__nightly_retrain"))
    assert found["startSchedule"]["__typename"] == "ScheduleStateResult", found
    found = server.graphql(_START_SENSOR, selector=selector("sensor", f"{NAME}__retrain_when_ready"))
    assert found["startSensor"]["__typename"] == "Sensor", found


def test_a_day(home: Path) -> None:
    environment = {"DAGSTER_HOME": eagle3("home").strip()}
    eagle3("sync-chunks", NAME)
    with dagster_dev(environment, home / "dev.log") as server:
        # Six chunks, through the daemon: the runs are queued, not executed by the command.
        output = wait("a heartbeat", lambda: through_daemon(home) and eagle3("materialize", NAME))
        assert "6 runs queued, first: dataset, synthetic_generations, hidden_states of chunk 000000" in output
        assert "3 engine starts" in output
        assert plan(context()).todo == []
        start(server)
        wait("a night without news", lambda: skipped(server, 1))
        before, starts = {run.run_id for run in runs(home)}, len(context().engines.starts())
        write_file(home, 6)
        write_file(home, 7)
        wait("two new partitions", lambda: partitions(home)[6:] == ["000006", "000007"])
        wait(
            "the chunks", lambda: {r.tags.get("dagster/partition") for r in done(home, before)} == {"000006", "000007"}
        )
    # The daemon is killed between the chunks and the training; another one carries on.
    with dagster_dev(environment, home / "dev.log") as server:
        wait("a published draft", lambda: outcome() == "published")
        wait("two nights without news", lambda: skipped(server, 2))
    new = [run for run in runs(home) if run.run_id not in before]
    assert {run.status for run in new} == {DagsterRunStatus.SUCCESS}
    found = sorted((run.tags.get("dagster/partition", ""), run.tags[STAGES_TAG]) for run in new)
    assert found == [
        ("", "vocab_map,draft_checkpoint,draft_evaluation,published_draft"),
        ("000006", "dataset,synthetic_generations,hidden_states"),
        ("000007", "dataset,synthetic_generations,hidden_states"),
    ]
    assert len({run.tags[RETRAIN_TAG] for run in new}) == 1
    # One engine for both chunks, one that serves the new draft; the baseline is as it was.
    assert len(context().engines.starts()) - starts == 2
    assert plan(context()).todo == []


def through_daemon(home: Path) -> bool:
    """Whether the daemon has said that it lives."""
    from eagle3_pipeline.assets.daemon import daemon_runs

    with dg.DagsterInstance.from_config(str(home / "dagster_home")) as instance:
        return daemon_runs(instance)


def done(home: Path, before: set[str]) -> list[dg.DagsterRun]:
    return [run for run in runs(home) if run.run_id not in before and run.status is DagsterRunStatus.SUCCESS]


def outcome() -> str:
    found = read_retrain(context().references.folder)
    return found.outcome if found else ""
