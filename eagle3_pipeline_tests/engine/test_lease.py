"""Leases between real processes."""

import json
import os
import textwrap
from pathlib import Path

import psutil
import pytest

from eagle3_pipeline.engine.lease import GpuPool
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.errors import LeaseError
from eagle3_pipeline_tests.store.children import REPOSITORY, Child, wait_until

# Arguments: folder, GPUs of the pool, GPUs wanted, holder, whether to start a child that sleeps.
HOLD = """
    import subprocess, sys
    from pathlib import Path
    from eagle3_pipeline.engine.lease import GpuPool
    folder, num_gpus, count, holder, child = sys.argv[1:]
    with GpuPool(Path(folder), int(num_gpus)).acquire(int(count), holder, 10.0, print) as lease:
        pid = subprocess.Popen(["sleep", "300"]).pid if child == "child" else 0
        print(*lease.gpus, "pid", pid, flush=True)
        sys.stdin.read()
"""


def _ignore(_message: str) -> None: ...


def _hold(folder: Path, num_gpus: int, count: int, holder: str, child: str = "", new_session: bool = False) -> Child:
    return Child(HOLD, folder, num_gpus, count, holder, child, new_session=new_session)


def _sleeps(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_gpus_are_handed_out_in_index_order(tmp_path: Path) -> None:
    pool = GpuPool(tmp_path, 4)
    with pool.acquire(2, "first", 1.0, _ignore) as first:
        assert first.gpus == (0, 1)
        assert first.environment()["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert first.environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        with pool.acquire(1, "second", 1.0, _ignore) as second:
            assert second.gpus == (2,)
        with pool.acquire(2, "third", 1.0, _ignore) as third:
            assert third.gpus == (2, 3)
    assert pool.holders() == {"gpu-0": None, "gpu-1": None, "gpu-2": None, "gpu-3": None}


def test_a_held_device_is_refused_in_time_with_its_holders_name_and_pid(tmp_path: Path) -> None:
    with _hold(tmp_path, 1, 1, "training of demo") as child:
        assert child.line() == "0 pid 0"
        expected = (
            rf"engine x: no free device within 0 s; gpu-0 is held by training of demo \(pid {child.process.pid}\)"
        )
        with pytest.raises(LeaseError, match=expected), GpuPool(tmp_path, 1).acquire(1, "engine x", 0.3, _ignore):
            pass
        assert child.finish() == 0
    with GpuPool(tmp_path, 1).acquire(1, "engine x", 0.3, _ignore) as lease:
        assert lease.gpus == (0,)


def test_a_request_takes_all_gpus_it_wants_or_none(tmp_path: Path) -> None:
    pool = GpuPool(tmp_path, 3)
    with _hold(tmp_path, 3, 2, "engine") as child:
        assert child.line() == "0 1 pid 0"
        with pytest.raises(LeaseError, match=r"gpu-0 is held by engine .*; gpu-1 is held by engine"):
            pool.acquire(2, "training", 0.3, _ignore).__enter__()
        assert pool.holders()["gpu-2"] is None, "the one free GPU was given back"
        with pool.acquire(1, "small", 0.3, _ignore) as lease:
            assert lease.gpus == (2,)


def test_who_waits_is_told_who_holds_and_gets_the_device_when_it_is_free(tmp_path: Path) -> None:
    messages: list[str] = []
    with _hold(tmp_path, 0, 1, "engine of demo") as child:
        child.line()

        def on_wait(message: str) -> None:
            messages.append(message)
            child.finish()

        with GpuPool(tmp_path, 0).acquire(1, "training", 20.0, on_wait):
            pass
    assert messages == [f"training: waiting for 1 of cpu-0; cpu-0 is held by engine of demo (pid {child.process.pid})"]


def test_more_gpus_than_there_are_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="9 GPUs wanted for engine x, this machine's pool has 8"):
        GpuPool(tmp_path, 8).acquire(9, "engine x", 1000.0, _ignore).__enter__()


@pytest.mark.parametrize("count", [0, 1, 8])
def test_a_machine_without_gpus_has_one_slot_whatever_is_wanted(tmp_path: Path, count: int) -> None:
    pool = GpuPool(tmp_path, 0)
    with pool.acquire(count, "engine", 1.0, _ignore) as lease:
        assert lease.gpus == ()
        holder = pool.holders()["cpu-0"]
        assert holder is not None and (holder["holder"], holder["pid"]) == ("engine", os.getpid())
        with pytest.raises(LeaseError, match="cpu-0 is held by engine"):
            pool.acquire(1, "another", 0.2, _ignore).__enter__()


def test_a_lease_ends_with_an_exception_of_its_holder(tmp_path: Path) -> None:
    pool = GpuPool(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), pool.acquire(1, "x", 1.0, _ignore):
        raise ZeroDivisionError
    assert pool.holders() == {"gpu-0": None}
    assert (tmp_path / "gpu-0.lock").read_text() == "", "nobody is blamed later"


def test_the_next_holder_ends_what_a_killed_holder_left_running(tmp_path: Path) -> None:
    with _hold(tmp_path, 1, 1, "engine", "child", new_session=True) as child:
        left = int(child.line().split()[-1])
        child.kill()
        assert _sleeps(left), "the child of the killed holder lives on"
        with GpuPool(tmp_path, 1).acquire(1, "next", 5.0, _ignore):
            assert not _sleeps(left)


def test_a_holder_that_ended_well_leaves_nothing_to_end(tmp_path: Path) -> None:
    with _hold(tmp_path, 1, 1, "engine", "child", new_session=True) as child:
        left = int(child.line().split()[-1])
        child.finish()
        with GpuPool(tmp_path, 1).acquire(1, "next", 5.0, _ignore):
            assert _sleeps(left)
        psutil.Process(left).kill()


def test_a_process_of_our_own_session_is_left_alone(tmp_path: Path) -> None:
    with _hold(tmp_path, 1, 1, "run", "child") as child:
        left = int(child.line().split()[-1])
        child.kill()
        with GpuPool(tmp_path, 1).acquire(1, "next", 5.0, _ignore):
            assert _sleeps(left)
        psutil.Process(left).kill()


def test_a_stranger_that_got_the_dead_holders_pid_is_left_alone(tmp_path: Path) -> None:
    with Child("import sys; print('up', flush=True); sys.stdin.read()", new_session=True) as stranger:
        assert stranger.line() == "up"
        pid = stranger.process.pid
        record = {"holder": "dead", "pid": 1, "session": pid, "session_started": 1.5}
        (tmp_path / "gpu-0.lock").write_text(json.dumps(record))
        with GpuPool(tmp_path, 1).acquire(1, "next", 5.0, _ignore):
            assert _sleeps(pid)


@pytest.mark.parametrize(
    "content",
    [b"", b"{ torn", b"[1]", b'{"holder": "x"}', b'{"session": 999999999}', b"\xff\xfe\x00{", b"[" * 200_000],
    ids=range(7),
)
def test_a_lock_file_of_any_content_can_be_leased(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gpu-0.lock").write_bytes(content)
    pool = GpuPool(tmp_path, 1)
    with pool.acquire(1, "next", 5.0, _ignore) as lease:
        assert lease.gpus == (0,)
        (tmp_path / "gpu-0.lock").write_bytes(content)
        assert pool.holders()["gpu-0"]


def test_the_shell_of_a_killed_holder_is_left_alone(tmp_path: Path) -> None:
    shell_code = """
        import subprocess, sys
        holder = subprocess.Popen([sys.executable, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        print(holder.pid, holder.stdout.readline().decode().strip(), flush=True)
        sys.stdin.read()
    """
    with Child(shell_code, "-c", textwrap.dedent(HOLD), tmp_path, 1, 1, "training", "", new_session=True) as shell:
        holder = int(shell.line().split()[0])
        psutil.Process(holder).kill()
        wait_until(lambda: not _sleeps(holder))
        with GpuPool(tmp_path, 1).acquire(1, "next", 5.0, _ignore):
            pass
        assert _sleeps(shell.process.pid)


def test_the_worker_of_a_killed_run_is_ended_by_the_next_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_work"
    package.mkdir()
    (package / "worker.py").write_text(
        "import os, time\nfrom eagle3_pipeline.workers import claim_stdout, emit\n"
        "emit(claim_stdout(), 'started', pid=os.getpid())\ntime.sleep(300)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    run_code = """
        import sys
        from pathlib import Path
        from eagle3_pipeline.engine.manager import EngineManager
        from eagle3_pipeline.errors import TrainingError
        from eagle3_pipeline.workers import run_worker
        home = Path(sys.argv[1])
        show = lambda event: print(event["pid"], flush=True)
        with EngineManager(home, 1).lease(1, "training", 10.0, print, "m") as lease:
            run_worker("some_work.worker", {}, home, show, TrainingError, "training", lease.environment())
    """
    with Child(run_code, tmp_path / "home", new_session=True) as run:
        worker = int(run.line())
        run.kill()
        try:
            with EngineManager(tmp_path / "home", 1).lease(1, "next", 5.0, _ignore, "m"):
                assert not _sleeps(worker), "two trainings on one GPU"
        finally:
            if _sleeps(worker):
                psutil.Process(worker).kill()
