"""How engines end: one death is one death, a stop is none, a killed host leaves nothing, waiting runs keep a load."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3_pipeline.engine.breaker import read_failures, record_failure
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import EngineDiedError, EngineError, EngineStoppedError
from eagle3_pipeline_tests.engine.conftest import JobMaker, engine_spec, processes_that_mention
from eagle3_pipeline_tests.store.children import wait_until


def quiet(_line: str) -> None: ...


def state_of(manager: EngineManager) -> EngineState:
    return EngineState(manager.folder / engine_spec().engine_id)


def failing_clients(
    manager: EngineManager, make_job: JobMaker, tmp_path: Path, count: int, end: str
) -> list[EngineError]:
    """Several clients at work when their engine ends; each tells the circuit breaker, as stages do."""
    jobs = [make_job(journal=str(tmp_path / f"journal-{i}")) for i in range(count)]
    ready = threading.Barrier(count + 1)

    def work(number: int) -> EngineError:
        with manager.acquire(engine_spec(), quiet) as client:
            ready.wait()
            try:
                client.generate(jobs[number])
            except EngineDiedError as error:
                manager.died(client, error)
                return error
            except EngineStoppedError as error:
                return error
        raise AssertionError("the engine answered")

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(work, number) for number in range(count)]
        ready.wait()
        wait_until(lambda: state_of(manager).read().get("jobs") == count)
        if end == "stop":
            manager.stop_all(quiet)
        else:
            os.kill(state_of(manager).read()["pid"], signal.SIGKILL)
        return [future.result(60) for future in futures]


def test_one_death_that_four_clients_tell_of_is_one(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "60")
    errors = failing_clients(manager, make_job, tmp_path, 4, "kill")
    assert {type(error) for error in errors} == {EngineDiedError}
    assert read_failures(state_of(manager).folder).count == 1
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0")
    manager.acquire(engine_spec(), quiet).close()


def test_two_hosts_that_die_are_two_deaths_in_whatever_order_they_are_told(tmp_path: Path) -> None:
    record_failure(tmp_path, "first", deterministic=False, host="1-1.0")
    record_failure(tmp_path, "first again", deterministic=False, host="1-1.0")
    assert (read_failures(tmp_path).count, read_failures(tmp_path).last) == (1, "first")
    record_failure(tmp_path, "second", deterministic=False, host="2-2.0")
    assert read_failures(tmp_path).count == 2


def test_a_stop_is_no_death_and_says_that_it_was_one(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "60")
    for _ in range(3):
        errors = failing_clients(manager, make_job, tmp_path, 2, "stop")
        assert all("was stopped while it worked (eagle3 engine stop" in str(error) for error in errors)
    assert read_failures(state_of(manager).folder).count == 0
    log = state_of(manager).log.read_text()
    assert "StreamReaderProtocol" not in log and "Traceback" not in log


def test_a_stop_while_it_loads_is_no_death_either(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "60")
    errors: list[EngineError] = []

    def start() -> None:
        try:
            manager.acquire(engine_spec(), quiet)
        except EngineError as error:
            errors.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    wait_until(lambda: state_of(manager).read().get("phase") == "loading")
    manager.stop_all(quiet)
    starter.join(30)
    assert [type(error) for error in errors] == [EngineStoppedError]
    assert read_failures(state_of(manager).folder).count == 0


def test_the_log_of_a_dead_core_ends_with_what_happened(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_CORE", "1")
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "60")
    with manager.acquire(engine_spec(), quiet) as client:
        killer = threading.Timer(1.0, lambda: [child.kill() for child in children(manager)])
        killer.start()
        monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0")
        with pytest.raises(EngineDiedError) as caught:
            client.generate(make_job())
    assert "StreamReaderProtocol" not in str(caught.value)


def children(manager: EngineManager) -> list:
    hosts = processes_that_mention(str(manager.folder))
    return [child for host in hosts for child in host.children() if child.name() == "sleep"]


def test_what_a_killed_host_leaves_is_ended_at_once(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks for the device again: no lease is taken, no command is called."""
    monkeypatch.setenv("EAGLE3_FAKE_CORE", "1")
    manager.acquire(engine_spec(), quiet).close()
    (core,) = children(manager)
    os.kill(state_of(manager).read()["pid"], signal.SIGKILL)
    wait_until(lambda: not core.is_running() or core.status() == "zombie")


def test_the_reaper_ends_with_a_host_that_ends_well(manager: EngineManager) -> None:
    manager.acquire(engine_spec(), quiet).close()
    pid = state_of(manager).read()["pid"]
    assert len(processes_that_mention(f'"session": {pid}')) == 1
    manager.stop_all(quiet)
    wait_until(lambda: processes_that_mention(f'"session": {pid}') == [])


@pytest.mark.parametrize("somebody_waits", [True, False])
def test_an_interrupted_starter_leaves_its_load_to_those_who_wait(
    home: Path, manager: EngineManager, monkeypatch: pytest.MonkeyPatch, somebody_waits: bool
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "4")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from eagle3_pipeline.engine.manager import EngineManager\n"
        "from eagle3_pipeline_tests.engine.conftest import engine_spec\n"
        "EngineManager(Path(sys.argv[1]), 0).acquire(engine_spec(), print)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(home)], stderr=subprocess.DEVNULL)
    wait_until(lambda: state_of(manager).read().get("phase") == "loading")
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(lambda: manager.acquire(engine_spec(), quiet).close()) if somebody_waits else None
    time.sleep(1)
    starter.send_signal(signal.SIGINT)
    starter.wait(10)
    if waiting:
        waiting.result(30)
        assert state_of(manager).is_alive()
    else:
        wait_until(lambda: not state_of(manager).is_alive())
    assert len(manager.starts()) == 1
    pool.shutdown()


def test_a_disk_that_is_full_when_the_load_ends_delays_the_news_only(
    small_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "2")
    manager = EngineManager(small_volume / "home", 0)
    spec = engine_spec(idle_timeout_s=1.0)
    pool = ThreadPoolExecutor(1)
    try:
        waiting = pool.submit(manager.acquire, spec, quiet)
        state = EngineState(manager.folder / spec.engine_id)
        wait_until(lambda: state.read().get("phase") == "loading")
        fill = small_volume / "fill"
        with contextlib.suppress(OSError), fill.open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        # The load is over, and so would be the idle timeout.
        time.sleep(5)
        assert state.read()["phase"] == "loading" and state.is_alive() and not waiting.done()
        fill.unlink()
        with waiting.result(20) as client:
            assert client.request("info")["clients"] == 1
    finally:
        manager.stop_all(quiet)
        pool.shutdown()
