"""The command line: help that reads well, errors of one message, engines of dead hosts."""

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from eagle3_pipeline.cli import main
from eagle3_pipeline.engine.breaker import record_failure
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.preflight import gib
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline_tests.engine.conftest import engine_spec, processes_that_mention
from eagle3_pipeline_tests.store.children import wait_until


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith(("EAGLE3_", "DAGSTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_help_keeps_its_examples_on_lines_of_their_own() -> None:
    lines = [line.strip() for line in command("--help").output.splitlines()]
    assert "A first look:      eagle3 demo" in lines
    assert "What is stale:     eagle3 plan smollm2_demo" in lines
    commands = ("plan", "materialize", "sync-chunks", "verify", "preflight", "status", "engine")
    assert [name for name in commands if not any(line.startswith(f"{name} ") for line in lines)] == []


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(5 * 2**20, "5.0 MiB"), (102 * 2**20, "102.0 MiB"), (2**30 / 10, "0.1 GiB"), (2**40, "1,024.0 GiB")],
)
def test_bytes_are_shown_in_a_unit_that_suits_them(num_bytes: float, text: str) -> None:
    assert gib(num_bytes) == text


def test_a_pipeline_file_with_an_impossible_name_says_to_rename_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "My-Model.yaml").write_text("verifier: {model: m}\ndataset: {path: p}\n")
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path))
    result = command("plan", "My-Model")
    assert result.exit_code == 1
    assert "My-Model.yaml" in result.output and "(the file's name: rename it)" in result.output


def test_a_broken_dagster_database_is_an_error_of_one_message(home: Path, tmp_path: Path) -> None:
    (home / "dagster_home" / "history").mkdir(parents=True)
    (home / "dagster_home" / "history" / "runs.db").write_bytes(b"no database" * 1000)
    result = command("materialize", "smollm2_demo")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert f"Dagster cannot use its database under {home / 'dagster_home'}" in result.output


def test_engine_stop_ends_what_a_killed_host_left(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_CORE", "1")
    manager, spec = EngineManager(home, 0), engine_spec(model_path=str(tmp_path / "m"))
    manager.acquire(spec, lambda _line: None).close()
    host = EngineState(manager.folder / spec.engine_id).read()["pid"]
    found = [child for process in processes_that_mention(str(home)) for child in process.children()]
    children = [child for child in found if child.name() == "sleep"]
    # Without the reaper, which would end it at once.
    (reaper,) = processes_that_mention(f'"session": {host}')
    reaper.kill()
    os.kill(host, signal.SIGKILL)
    wait_until(lambda: not EngineState(manager.folder / spec.engine_id).is_alive())
    assert children[0].is_running()
    assert "not running" in command("engine", "list").output
    assert "ended what the killed host of m float32 had left" in command("engine", "stop").output
    wait_until(lambda: not children[0].is_running() or children[0].status() == "zombie")


@pytest.mark.parametrize(
    ("deaths", "phase"),
    [
        # Whether the engine itself gave up each of its starts; where not, it was killed.
        ([True], "its last start failed; eagle3 engine reset tries it again"),
        ([False], "not running; its last start failed"),
        ([False, False], "kept dying; eagle3 engine reset tries it again"),
        ([False, True], "kept dying; eagle3 engine reset tries it again"),
    ],
)
def test_an_engine_that_failed_says_so_until_it_is_reset(home: Path, deaths: list[bool], phase: str) -> None:
    manager, spec = EngineManager(home, 0), engine_spec()
    EngineState(manager.folder / spec.engine_id).prepare(spec)
    for number, deterministic in enumerate(deaths):
        record_failure(manager.folder / spec.engine_id, "out of memory", deterministic, host=f"{number}-1")
    assert [_phase(command(*name)) for name in (("engine", "list"), ("status",))] == [phase, phase]
    assert command("engine", "reset").output == "1 engines may be started again\n"
    assert _phase(command("engine", "list")) == "not running"


def test_a_single_death_at_work_is_no_failed_start(home: Path, tmp_path: Path) -> None:
    manager, spec = EngineManager(home, 0), engine_spec(model_path=str(tmp_path / "m"))
    with manager.acquire(spec, lambda _line: None) as client:
        os.kill(EngineState(client.folder).read()["pid"], signal.SIGKILL)
        wait_until(lambda: not EngineState(client.folder).is_alive())
        manager.died(client, EngineError("killed"))
    assert _phase(command("engine", "list")) == "not running"


def _phase(result: Result) -> str:
    """Of the only engine in a table."""
    lines = result.output.splitlines()
    heads = next(line for line in lines if line.startswith("engine "))
    return lines[lines.index(heads) + 2].split("  ")[1]


@pytest.mark.parametrize(
    ("section", "setting", "problem"),
    [
        ("evaluation", "near_tie_epsilon: -0.1", "greater than or equal to 0"),
        ("evaluation", "num_speculative_tokens: 5000", "less than or equal to 64"),
        ("training", "lr: 30", "less than or equal to 1"),
    ],
)
def test_a_setting_out_of_range_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, setting: str, problem: str
) -> None:
    (tmp_path / "p.yaml").write_text(f"verifier: {{model: m}}\ndataset: {{path: p}}\n{section}: {{{setting}}}\n")
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path))
    result = command("plan", "p")
    assert result.exit_code == 1
    assert f"{section}.{setting.partition(':')[0]}: Input should be {problem}" in result.output
