"""Subprocess workers: events, errors, logs, and how they end."""

import os
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.workers import avoid_multicast, log_end, log_tail, run_worker
from eagle3_pipeline_tests.store.children import REPOSITORY, wait_until

Runner = Callable[..., dict[str, Any]]
HEAD = """
    import json, os, subprocess, sys, time
    from eagle3_pipeline.workers import claim_stdout, emit
    spec = json.load(open(sys.argv[1]))
"""


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, events: list[dict[str, Any]]) -> Runner:
    """Runs a worker of this code."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))

    def run(code: str, on_event: Any = events.append, name: str = "", **environment: str) -> dict[str, Any]:
        package = tmp_path / f"some_work{name}"
        package.mkdir(exist_ok=True)
        (package / "worker.py").write_text(textwrap.dedent(HEAD) + textwrap.dedent(code))
        module, logs = f"some_work{name}.worker", tmp_path / f"logs{name}"
        return run_worker(module, {"n": 3}, logs, on_event, TrainingError, "demo: training", environment)

    return run


def test_the_result_event_is_the_answer_and_others_are_passed_on(run: Runner, events: list[dict[str, Any]]) -> None:
    code = """
        stream = claim_stdout()
        emit(stream, "progress", done=1)
        emit(stream, "progress", done=spec["n"])
        emit(stream, "result", total=2 * spec["n"], place=os.environ["PLACE"])
    """
    assert run(code, PLACE="here") == {"event": "result", "total": 6, "place": "here"}
    assert events == [{"event": "progress", "done": 1}, {"event": "progress", "done": 3}]


def test_what_libraries_print_goes_to_the_log(run: Runner, events: list[dict[str, Any]], tmp_path: Path) -> None:
    code = """
        print("before", flush=True)
        stream = claim_stdout()
        print("after", flush=True)
        os.system("echo from a child")
        emit(stream, "result")
    """
    run(code)
    assert events == [{"event": "log", "message": "before"}], "what comes too early is an event of its own"
    assert (tmp_path / "logs" / "some_work.log").read_text() == "after\nfrom a child\n"


@pytest.mark.parametrize(
    ("printed", "message"),
    [("b'not json'", "not json"), ("b'[1]'", "[1]"), ("b'{\"a\": 1}'", '{"a": 1}'), ("b'\\xff\\xfe'", "\ufffd\ufffd")],
)
def test_lines_that_are_no_events_become_log_events(
    run: Runner, events: list[dict[str, Any]], printed: str, message: str
) -> None:
    run(f"os.write(1, {printed} + b'\\n'); emit(claim_stdout(), 'result')")
    assert events == [{"event": "log", "message": message}]


def test_a_workers_own_error_is_the_message(run: Runner) -> None:
    code = "emit(claim_stdout(), 'error', message='every loss mask is empty'); sys.exit(1)"
    with pytest.raises(TrainingError, match="^demo: training failed: every loss mask is empty$"):
        run(code)


def test_a_crash_shows_exit_code_and_the_end_of_the_log(run: Runner, tmp_path: Path) -> None:
    code = """
        for number in range(100):
            print("line", number, file=sys.stderr)
        raise RuntimeError("boom")
    """
    with pytest.raises(TrainingError, match="demo: training failed: exit code 1; the end of .*some_work.log") as caught:
        run(code)
    assert "  | RuntimeError: boom" in str(caught.value)
    assert "  | line 99" in str(caught.value) and "line 50" not in str(caught.value)


def test_a_killed_worker_is_an_error(run: Runner) -> None:
    with pytest.raises(TrainingError, match="exit code -9"):
        run("os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("code", ["pass", "emit(claim_stdout(), 'progress')"])
def test_an_end_without_result_is_an_error(run: Runner, code: str) -> None:
    with pytest.raises(TrainingError, match="exit code 0"):
        run(code)


def test_a_result_before_a_crash_does_not_count(run: Runner) -> None:
    with pytest.raises(TrainingError, match="exit code 3"):
        run("emit(claim_stdout(), 'result'); os._exit(3)")


def _is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_children_of_a_finished_worker_are_ended(run: Runner) -> None:
    code = """
        stream = claim_stdout()
        emit(stream, "result", child=subprocess.Popen(["sleep", "300"]).pid)
    """
    child = run(code)["child"]
    wait_until(lambda: not _is_running(child))


def test_an_interrupted_caller_ends_the_worker_and_its_children(run: Runner) -> None:
    pids: list[int] = []

    def interrupt(event: dict[str, Any]) -> None:
        pids.extend(event["pids"])
        raise KeyboardInterrupt

    code = """
        stream = claim_stdout()
        emit(stream, "started", pids=[os.getpid(), subprocess.Popen(["sleep", "300"]).pid])
        time.sleep(300)
    """
    with pytest.raises(KeyboardInterrupt):
        run(code, interrupt)
    assert len(pids) == 2
    wait_until(lambda: not any(_is_running(pid) for pid in pids))


def test_a_worker_that_ignores_sigterm_is_killed(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_pipeline.workers._TERMINATION_GRACE_S", 0.3)
    pids: list[int] = []

    def interrupt(event: dict[str, Any]) -> None:
        pids.append(event["pid"])
        raise KeyboardInterrupt

    code = """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        emit(claim_stdout(), "started", pid=os.getpid())
        time.sleep(300)
    """
    with pytest.raises(KeyboardInterrupt):
        run(code, interrupt)
    assert not _is_running(pids[0])


def test_modules_do_not_come_from_the_folder_it_is_called_in(
    run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "random.py").write_text("raise RuntimeError('a file of the folder that one works in')")
    monkeypatch.chdir(elsewhere)
    code = """
        import random
        emit(claim_stdout(), "result", file=random.__file__)
    """
    found = run(code)["file"]
    assert Path(found).parent != elsewhere


def test_two_workers_run_at_once(run: Runner) -> None:
    results: list[dict[str, Any]] = []
    code = "emit(claim_stdout(), 'result', pid=os.getpid())"
    threads = [threading.Thread(target=lambda name=name: results.append(run(code, name=name))) for name in ("1", "2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({result["pid"] for result in results}) == 2


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthree \xff\n")
    assert log_tail(path, 2) == "  | two\n  | three \ufffd\n"
    assert "no log" in log_tail(tmp_path / "none")


def test_multicast_is_off_unless_variables_say_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {"NCCL_NVLS_ENABLE": "1"})
    avoid_multicast()
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"


def test_the_end_of_a_log_begins_with_the_errors_that_scrolled_out_of_it(tmp_path: Path) -> None:
    """vLLM's core process logs why it failed; then its parent tells at length that the core failed."""
    lines = ["INFO starting", "(EngineCore pid=7) ERROR 11-30 [core.py:1] AssertionError: memory was freed meanwhile"]
    lines += [f"  frame {i}" for i in range(40)] + ["RuntimeError: Engine core initialization failed"]
    path = tmp_path / "engine.log"
    path.write_text("\n".join(lines) + "\n")
    told = log_end(path, 5).splitlines()
    assert told[0] == "  ! AssertionError: memory was freed meanwhile"
    assert told[1:] == [f"  | {line}" for line in lines[-5:]]
    assert log_end(tmp_path / "none", 5).startswith("  (no log: ")


def test_of_many_errors_the_last_different_ones_are_told(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text("".join(f"ValueError: {name}\n" for name in "abcadd") + "the end\n")
    assert log_end(path, 1).splitlines() == [*(f"  ! ValueError: {name}" for name in "cad"), "  | the end"]
