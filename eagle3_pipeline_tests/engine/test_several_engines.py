"""Several engines of one spec: for work at the same time only, where there are GPUs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline_tests.engine.conftest import JobMaker, engine_spec


def _quiet(_line: str) -> None: ...


def _pid(client: EngineClient) -> int:
    return client.request("info")["pid"]


def _gpus(manager: EngineManager) -> list[list[int]]:
    return sorted(state.read()["gpus"] for state in manager.engines() if state.is_alive())


def test_one_engine_serves_all_unless_more_are_allowed(home: Path) -> None:
    manager, spec = EngineManager(home, 2), engine_spec(num_gpus=1)
    with manager.acquire(spec, _quiet) as first, manager.acquire(spec, _quiet) as second:
        assert _pid(first) == _pid(second)
    assert _gpus(manager) == [[0]]


def test_another_engine_starts_while_all_are_at_work(home: Path, log: list[str]) -> None:
    manager, spec = EngineManager(home, 2), engine_spec(num_gpus=1, max_engines=3)
    with manager.acquire(spec, _quiet) as first, manager.acquire(spec, log.append) as second:
        assert "(engine 2 of its kind)" in log[0]
        assert _gpus(manager) == [[0], [1]]
        # No GPU is left for a third one: the engines get the same number of clients.
        with manager.acquire(spec, _quiet) as third, manager.acquire(spec, _quiet) as fourth:
            assert sorted(map(_pid, (third, fourth))) == sorted(map(_pid, (first, second)))
            assert len(manager.starts()) == 2
    assert manager.is_running(spec)
    with manager.acquire(spec, _quiet) as first, manager.acquire(spec, _quiet) as second:
        assert _pid(first) != _pid(second), "idle ones are used first"
    assert len(manager.starts()) == 2


def test_one_run_after_the_other_needs_one_engine(home: Path, make_job: JobMaker) -> None:
    manager, spec = EngineManager(home, 4), engine_spec(num_gpus=1, max_engines=4)
    for number in range(5):
        with manager.acquire(spec, _quiet) as client:
            client.generate(make_job(f"job{number}"))
    assert len(manager.starts()) == 1


def test_gpus_that_others_hold_are_left_alone(home: Path) -> None:
    manager, spec = EngineManager(home, 3), engine_spec(num_gpus=2, max_engines=2)
    with (
        manager.lease(1, "training", 5.0, _quiet, "another model"),
        manager.acquire(spec, _quiet) as first,
        manager.acquire(spec, _quiet) as second,
    ):
        assert _pid(first) == _pid(second)
    assert _gpus(manager) == [[1, 2]]


def test_runs_that_begin_together_start_as_many_engines_as_fit(
    home: Path, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "1.0")
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0.1")
    spec, together = engine_spec(num_gpus=1, max_engines=2), threading.Barrier(6)
    jobs = [make_job(f"job{number}") for number in range(6)]

    def work(number: int) -> tuple[int, int]:
        together.wait()
        with EngineManager(home, 2).acquire(spec, _quiet) as client:
            return _pid(client), client.generate(jobs[number])["done"]

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))
    assert [done for _, done in results] == [6] * 6
    assert len({pid for pid, _ in results}) == len(EngineManager(home, 2).starts()) == 2


def test_work_goes_on_without_an_engine_that_does_not_start(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, spec = EngineManager(home, 2), engine_spec(num_gpus=1, max_engines=2)
    with manager.acquire(spec, _quiet) as first:
        monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
        with pytest.raises(EngineError, match="did not start"):
            manager.acquire(spec, _quiet)
        with manager.acquire(spec, _quiet) as second:
            assert _pid(second) == _pid(first)
    manager.stop_all(_quiet)
    # Nothing runs: the first one is tried, and its failure is told.
    for message in ("did not start", "is not started again"):
        with pytest.raises(EngineError, match=message):
            manager.acquire(spec, _quiet)


def test_the_number_of_an_engine_is_part_of_its_identity() -> None:
    specs = [engine_spec(num_gpus=1, max_engines=2, instance=i) for i in range(2)]
    assert len({spec.engine_id for spec in specs}) == 2
    assert EngineSpec.from_json(specs[1].to_json()) == specs[1]
