"""Life of engines: started once, reused, retired, waited for, and how they end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.engine import manager as managing
from eagle3_pipeline.engine.breaker import reset_failures
from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.jobs import read_journal
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import EngineError, EngineSilentError, LeaseError
from eagle3_pipeline_tests.engine.conftest import PROMPTS, JobMaker, engine_spec, journal_rows
from eagle3_pipeline_tests.fake_engine import answer_tokens
from eagle3_pipeline_tests.store.children import wait_until


def _quiet(_line: str) -> None: ...


def _pid(client: EngineClient) -> int:
    return client.request("info")["pid"]


def _state(manager: EngineManager, spec: EngineSpec) -> EngineState:
    return EngineState(manager.folder / spec.engine_id)


def _listens(state: EngineState) -> bool:
    """The kernel closes a killed process's sockets some time after its end."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(state.socket)) == 0


def test_a_stopped_host_does_not_wait_for_the_connections_of_others(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_WAIT_CLOSED", "1")
    manager, spec = EngineManager(home, 0), engine_spec()
    with manager.acquire(spec, _quiet), manager.acquire(spec, _quiet) as client:
        client.request("shutdown")
        wait_until(lambda: not _state(manager, spec).is_alive(), 10)


def test_three_clients_at_once_share_one_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "0.5")
    spec, together = engine_spec(), threading.Barrier(3)

    def work(_: int) -> int:
        together.wait()
        with EngineManager(home, 0).acquire(spec, _quiet) as client:
            together.wait()
            assert client.request("info")["clients"] == 3
            together.wait()
            return _pid(client)

    with ThreadPoolExecutor(3) as pool:
        pids = set(pool.map(work, range(3)))
    starts = EngineManager(home, 0).starts()
    assert len(pids) == 1
    assert [(start["engine_id"], start["pid"]) for start in starts] == [(spec.engine_id, *pids)]


def test_an_engine_that_runs_is_reused_and_says_so(manager: EngineManager, log: list[str], make_job: JobMaker) -> None:
    for number in range(3):
        with manager.acquire(engine_spec(), log.append) as client:
            client.generate(make_job(f"job{number}"))
    assert len(manager.starts()) == 1
    assert [line.split(" the ")[0] for line in log].count("reusing") == 2
    assert _state(manager, engine_spec()).read()["jobs"] == 3


def test_an_engine_that_runs_is_reused_without_a_turn(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks of one run that find it at work would wait one for the other's question to it.
    with manager.acquire(engine_spec(), _quiet) as first:
        monkeypatch.setattr(manager, "_turn", lambda *_: pytest.fail("waits for a start"))
        # It was chosen while it started; a mark that stays would speak of a start for as long as this process lives.
        manager._mark_waiting(engine_spec())
        with manager.acquire(engine_spec(), _quiet) as second:
            assert _pid(second) == _pid(first)
        assert not manager._num_waiting(engine_spec())


def test_an_engine_that_does_not_answer_is_told_of_and_can_be_stopped(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(managing, "_POLITE_S", 0.3)
    monkeypatch.setattr(managing, "_wait_gone", partial(managing._wait_gone, timeout_s=0.3))
    with manager.acquire(engine_spec(), _quiet) as client:
        os.kill(_pid(client), signal.SIGSTOP)
        with pytest.raises(EngineSilentError, match=r"\(pid \d+\) does not answer within 0 s; .* eagle3 engine stop"):
            client.request("info", timeout_s=0.3)
    # Whoever waits for a device passes it over.
    manager.retire_idle(_quiet)
    manager.stop_all(_quiet)
    assert not _state(manager, engine_spec()).is_alive()


def test_every_field_of_a_spec_makes_another_engine() -> None:
    base = engine_spec()
    others = [
        engine_spec(model_path="other"),
        engine_spec(layer_ids=(1, 2), hidden_size=8),
        engine_spec(max_num_seqs=2),
        engine_spec(draft_path="d", num_speculative_tokens=3),
    ]
    assert len({spec.engine_id for spec in (base, *others)}) == 5
    assert engine_spec().engine_id == base.engine_id
    assert EngineSpec.from_json(others[1].to_json()) == others[1]


def test_an_idle_engine_exits_after_its_timeout(manager: EngineManager) -> None:
    spec = engine_spec(idle_timeout_s=0.2)
    with manager.acquire(spec, _quiet) as client:
        pid = _pid(client)
    state = _state(manager, spec)
    wait_until(lambda: not state.is_alive())
    assert (state.read()["phase"], state.read()["exit_code"]) == ("stopped", 0)
    assert not state.socket.exists()
    with manager.acquire(spec, _quiet) as client:
        assert _pid(client) != pid
    assert len(manager.starts()) == 2


def test_an_engine_with_a_client_does_not_time_out(manager: EngineManager) -> None:
    spec = engine_spec(idle_timeout_s=0.2)
    with manager.acquire(spec, _quiet) as client:
        time.sleep(2.5)  # The host looks once a second.
        assert client.request("info")["clients"] == 1


def test_an_idle_engine_makes_room_for_another_spec(manager: EngineManager) -> None:
    first, second = engine_spec(), engine_spec(max_num_seqs=2)
    manager.acquire(first, _quiet).close()
    with manager.acquire(second, _quiet) as client:
        assert _pid(client) == _state(manager, second).read()["pid"]
    wait_until(lambda: not _state(manager, first).is_alive())
    assert [start["engine_id"] for start in manager.starts()] == [first.engine_id, second.engine_id]


def test_a_busy_engine_is_waited_for(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0.3")
    busy, results, started = engine_spec(), [], threading.Event()

    def work() -> None:
        with manager.acquire(busy, _quiet) as client:
            started.set()
            results.append(client.generate(make_job(batch_size=1)))

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(20)
    with manager.acquire(engine_spec(max_num_seqs=2), _quiet):
        assert [result["done"] for result in results] == [6], "the other engine finished its job first"
    thread.join()


def test_two_engines_run_side_by_side_where_there_are_gpus(home: Path) -> None:
    manager = EngineManager(home, 2)
    one, two = engine_spec(num_gpus=1), engine_spec(num_gpus=1, max_num_seqs=2)
    with manager.acquire(one, _quiet) as first, manager.acquire(two, _quiet) as second:
        assert _pid(first) != _pid(second)
        assert [_state(manager, spec).read()["gpus"] for spec in (one, two)] == [[0], [1]]
        with pytest.raises(EngineError, match="3 GPUs wanted"):
            manager.acquire(engine_spec(num_gpus=3), _quiet)


def test_a_failed_start_shows_the_end_of_the_log(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
    with pytest.raises(EngineError, match=r"did not start \(exit code 1\)") as caught:
        manager.acquire(engine_spec(), _quiet)
    assert "  | RuntimeError: the fake engine was told not to start" in str(caught.value)
    assert _state(manager, engine_spec()).read()["phase"] == "failed"
    monkeypatch.delenv("EAGLE3_FAKE_FAIL")
    assert reset_failures(manager.folder / engine_spec().engine_id)
    with manager.acquire(engine_spec(), _quiet) as client:
        assert _pid(client)


def test_a_backend_that_does_not_exist_fails_the_start(manager: EngineManager) -> None:
    with pytest.raises(EngineError, match="No module named 'no_such_module'"):
        manager.acquire(engine_spec(backend="no_such_module:Backend"), _quiet)


def test_a_start_that_takes_too_long_is_given_up(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "60")
    with pytest.raises(EngineError, match="start_timeout_s"):
        manager.acquire(engine_spec(start_timeout_s=0.3), _quiet)


def test_a_starter_that_is_interrupted_takes_its_engine_along(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "6")
    monkeypatch.setattr("eagle3_pipeline.engine.manager._REPORT_EVERY_S", 0.5)

    def interrupt(line: str) -> None:
        if "loading" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.acquire(engine_spec(), interrupt)
    wait_until(lambda: not _state(manager, engine_spec()).is_alive(), timeout_s=3.0)


def test_work_of_a_killed_host_is_reused(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0.4")
    job, spec = make_job(batch_size=1), engine_spec()

    def kill_after_two_rows() -> None:
        wait_until(lambda: Path(job.journal).exists() and len(journal_rows(job)) >= 2)
        os.kill(_state(manager, spec).read()["pid"], signal.SIGKILL)

    killer = threading.Thread(target=kill_after_two_rows)
    killer.start()
    with manager.acquire(spec, _quiet) as client, pytest.raises(EngineError, match="the engine died while it worked"):
        client.generate(job)
    killer.join()
    wait_until(lambda: not _listens(_state(manager, spec)))
    done = len(journal_rows(job))
    assert 2 <= done < 6
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0")
    with manager.acquire(spec, _quiet) as client:
        result = client.generate(job)
    assert (result["reused"], result["done"]) == (done, 6 - done)
    answers = {name: row["token_ids"] for name, row in read_journal(Path(job.journal)).items()}
    assert answers == {name: answer_tokens(ids, 5) for name, ids in PROMPTS.items()}
    assert len(journal_rows(job)) == 6, "no row was generated twice"


def test_a_client_that_leaves_cancels_its_job_and_the_host_stays(
    manager: EngineManager, make_job: JobMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "60")
    monkeypatch.setenv("EAGLE3_FAKE_LOG", str(notes))
    with manager.acquire(engine_spec(), _quiet) as watcher:
        pid = _pid(watcher)
        with socket.socket(socket.AF_UNIX) as leaver:
            leaver.connect(str(_state(manager, engine_spec()).socket))
            leaver.sendall(json.dumps({"op": "generate", **vars(make_job())}).encode() + b"\n")
            wait_until(lambda: watcher.request("info")["jobs"] == 1)
        wait_until(lambda: notes.exists() and len(notes.read_text().splitlines()) == 6)
        assert {line.split()[0] for line in notes.read_text().splitlines()} == {"aborted"}
        wait_until(lambda: watcher.request("info")["clients"] == 1)
        assert _pid(watcher) == pid


def test_junk_on_the_socket_drops_that_client_only(manager: EngineManager) -> None:
    with manager.acquire(engine_spec(), _quiet) as client:
        path = str(_state(manager, engine_spec()).socket)
        for junk in (b"\x80 not json\n", b"x" * (2 << 20) + b"\n", b"[1, 2]\n", b""):
            with socket.socket(socket.AF_UNIX) as other:
                other.settimeout(10)
                other.connect(path)
                try:
                    other.sendall(junk)
                    other.shutdown(socket.SHUT_WR)
                    while other.recv(4096):
                        pass
                except ConnectionError:
                    pass
        wait_until(lambda: client.request("info")["clients"] == 1)


def test_the_socket_is_private(manager: EngineManager) -> None:
    with manager.acquire(engine_spec(), _quiet):
        path = _state(manager, engine_spec()).socket
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(manager.folder.stat().st_mode) == 0o700


def test_a_home_with_a_long_path_works(tmp_path: Path, home: Path, make_job: JobMaker) -> None:
    manager = EngineManager(home / ("long" * 30), 0)
    try:
        with manager.acquire(engine_spec(), _quiet) as client:
            path = _state(manager, engine_spec()).socket
            assert len(os.fsencode(path)) <= 107, "the kernel's limit"
            assert path.exists() and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert client.generate(make_job())["done"] == 6
    finally:
        manager.stop_all(_quiet)
    assert not path.exists()


def test_two_long_homes_have_two_sockets(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)
    assert EngineState(long / "a").socket != EngineState(long / "b").socket


def test_an_open_temporary_folder_for_the_socket_is_not_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    private = tmp_path / f"eagle3-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    try:
        folder = EngineState(tmp_path / ("x" * 120)).socket.parent
    except Exception as error:
        assert str(private) in str(error)
    else:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_host_whose_state_folder_is_gone_exits(manager: EngineManager) -> None:
    manager.acquire(engine_spec(), _quiet).close()
    state = _state(manager, engine_spec())
    pid = state.read()["pid"]
    shutil.rmtree(state.folder)

    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"

    wait_until(gone)


def test_training_gets_the_device_of_an_idle_engine(manager: EngineManager, log: list[str]) -> None:
    manager.acquire(engine_spec(), _quiet).close()
    with manager.lease(1, "training", 20.0, log.append, "m") as lease:
        assert lease.gpus == ()
        wait_until(lambda: not _state(manager, engine_spec()).is_alive())


def test_training_waits_for_a_busy_engine_and_names_it(manager: EngineManager) -> None:
    with (
        manager.acquire(engine_spec(), _quiet),
        pytest.raises(LeaseError, match="training: no free device .* held by engine no-such-model float32"),
        manager.lease(1, "training", 0.5, _quiet, "m"),
    ):
        pass


def test_stop_all_ends_a_busy_engine(manager: EngineManager, make_job: JobMaker, monkeypatch: Any) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "60")
    failures: list[BaseException] = []
    client = manager.acquire(engine_spec(), _quiet)

    def work() -> None:
        try:
            client.generate(make_job())
        except EngineError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    state = _state(manager, engine_spec())
    wait_until(lambda: state.read().get("jobs") == 1)
    manager.stop_all(_quiet)
    assert not state.is_alive()
    thread.join(10)
    assert len(failures) == 1 and "was stopped while it worked (eagle3 engine stop" in str(failures[0])


def test_a_state_of_a_dead_host_does_not_count(manager: EngineManager) -> None:
    spec = engine_spec()
    state = _state(manager, spec)
    state.prepare(spec)
    # This very process, but started at another time: a pid that was used again.
    (state.folder / "state.json").write_text(json.dumps({"phase": "ready", "pid": os.getpid(), "pid_started": 1.0}))
    state.socket.touch()
    assert not state.is_alive()
    with manager.acquire(spec, _quiet) as client:
        assert _pid(client) != os.getpid()


def test_an_engine_that_is_just_dying_is_not_reused(manager: EngineManager) -> None:
    # What a killed host looks like until the kernel has closed its socket: it connects, then the connection is gone.
    spec = engine_spec()
    state = _state(manager, spec)
    state.prepare(spec)
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(state.socket))
        dying.listen()
        dying.settimeout(10)

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    dying.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        try:
            with manager.acquire(spec, _quiet) as client:
                assert _pid(client) != os.getpid()
        finally:
            dying.shutdown(socket.SHUT_RDWR)
