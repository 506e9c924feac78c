"""An engine that keeps failing fails fast; an engine that samples garbage is found out."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_pipeline.engine import host, smoke
from eagle3_pipeline.engine.breaker import (
    distrust,
    distrusted,
    forget_distrust,
    read_failures,
    record_failure,
    reset_failures,
)
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.smoke import judge_sampling, row_differences, share_off
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline_tests.engine.conftest import capturing_spec, engine_spec
from eagle3_pipeline_tests.fake_engine import FakeBackend


def test_a_start_that_failed_by_itself_fails_the_next_request_at_once(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
    with pytest.raises(EngineError, match="the fake engine was told not to start"):
        manager.acquire(engine_spec(), print)
    started = time.monotonic()
    with pytest.raises(EngineError, match="the fake engine was told not to start") as caught:
        manager.acquire(engine_spec(), print)
    assert time.monotonic() - started < 1
    assert "eagle3 engine reset" in str(caught.value)
    assert len(manager.starts()) == 1


def test_other_execution_settings_are_another_engine(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
    with pytest.raises(EngineError):
        manager.acquire(engine_spec(), print)
    monkeypatch.delenv("EAGLE3_FAKE_FAIL")
    with manager.acquire(engine_spec(max_num_seqs=3), print) as client:
        assert client.started


def test_a_reset_tries_again(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
    with pytest.raises(EngineError):
        manager.acquire(engine_spec(), print)
    monkeypatch.delenv("EAGLE3_FAKE_FAIL")
    assert reset_failures(manager.folder / engine_spec().engine_id)
    with manager.acquire(engine_spec(), print) as client:
        assert client.started


def test_a_killed_start_may_be_tried_again(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "20")
    monkeypatch.setattr("eagle3_pipeline.engine.manager._REPORT_EVERY_S", 0.3)

    def kill(line: str) -> None:
        if "loading" in line:
            os.kill(EngineState(manager.folder / engine_spec().engine_id).read()["pid"], signal.SIGKILL)

    with pytest.raises(EngineError, match="exit code -9"):
        manager.acquire(engine_spec(), kill)
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "0")
    with manager.acquire(engine_spec(), print) as client:
        assert client.started


def test_two_deaths_at_work_trip_and_a_finished_job_forgives(tmp_path: Path) -> None:
    record_failure(tmp_path, "first", deterministic=False, host="1-1.0")
    assert not read_failures(tmp_path).tripped
    record_failure(tmp_path, "second", deterministic=False, host="2-2.0")
    assert read_failures(tmp_path).tripped
    assert read_failures(tmp_path).last == "second"
    assert reset_failures(tmp_path)
    assert not read_failures(tmp_path).tripped
    assert not reset_failures(tmp_path)


def test_the_smoke_test_decides_about_sampling(manager: EngineManager, monkeypatch: pytest.MonkeyPatch) -> None:
    with manager.acquire(engine_spec(), print) as client:
        assert client.may_sample
    manager.stop_all(print)
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "garbage")
    with manager.acquire(engine_spec(), print) as client:
        assert not client.may_sample


def test_the_smoke_test_proves_decoding_while_capturing(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager.acquire(capturing_spec(), print) as client:
        assert client.smoke["may_decode"] and not client.smoke["decoding_fault"]
    manager.stop_all(print)
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "wrong_decoding:smoke")
    with manager.acquire(capturing_spec(), print) as client:
        # Three prompts of 5, 12 and 19 tokens, 32 new ones each; of the last one there is no state.
        assert not client.smoke["may_decode"]
        assert "of 93 decoded tokens" in client.smoke["decoding_fault"]
    assert manager.last_smoke(capturing_spec())["decoding_fault"] == client.smoke["decoding_fault"]


class _Unwritten(FakeBackend):
    """Answers, and captures nothing of the smoke test."""

    def _write_states(self, *_: Any) -> None:
        """Nothing."""


def test_states_that_are_not_captured_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "_WRITTEN_WITHIN_S", 0.1)

    async def run() -> dict[str, Any]:
        backend = _Unwritten()
        await backend.start(capturing_spec())
        return await smoke.smoke_test(backend, capturing_spec())

    found = asyncio.run(run())
    assert not found["may_decode"] and found["may_sample"]
    assert "3 of 3 sequences were not captured" in found["decoding_fault"]


def test_rows_are_compared_one_by_one() -> None:
    """Of 10 rows of 2 layers, 3 are off in one layer by a quarter, a half, and all of their size."""
    right = np.ones((10, 2, 4), dtype=np.float32)
    found = right.copy()
    found[1, 0], found[4, 1], found[7, 1] = 1.25, 1.5, 2.0
    differences = row_differences(found, right)
    assert differences[[1, 4, 7], [0, 1, 1]].tolist() == [0.25, 0.5, 1.0]
    assert [share_off(differences, limit) for limit in (0.2, 0.3, 0.6, 1.0)] == [0.3, 0.2, 0.1, 0.0]
    assert share_off(differences[:0], 0.1) == 0.0


def test_a_reset_forgets_that_answers_were_wrong(tmp_path: Path) -> None:
    assert distrusted(tmp_path) == ""
    distrust(tmp_path, "garbage")
    assert distrusted(tmp_path) == "garbage"
    assert not reset_failures(tmp_path), "a finished job does not make it trusted"
    assert distrusted(tmp_path) == "garbage"
    assert forget_distrust(tmp_path) and not forget_distrust(tmp_path)
    assert distrusted(tmp_path) == ""


@pytest.mark.parametrize(
    ("hits", "masses", "plausible"),
    [
        # A confident model: 48 positions of mass 0.95 give 45.6 hits, deviation 1.5; the limit is 45.6 - 6.0 - 1.
        (46, [0.95] * 48, True),
        (39, [0.95] * 48, True),
        (38, [0.95] * 48, False),
        (2, [0.95] * 48, False),
        # A model that knows nothing, 20 of 320 tokens: 3 hits expected, deviation 1.7; nothing can be told apart.
        (0, [20 / 320] * 48, True),
    ],
)
def test_hits_are_compared_with_the_mass_of_the_likely_tokens(hits: int, masses: list[float], plausible: bool) -> None:
    assert judge_sampling(hits, masses).may_sample is plausible


@pytest.mark.parametrize(
    ("told", "killed"),
    [
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': -9}", True),
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': -15}", True),
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {}", True),
        ("Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}", False),
        ("No available memory for the cache blocks", False),
    ],
)
def test_a_core_that_was_killed_is_told_from_one_that_gave_up(told: str, killed: bool) -> None:
    assert bool(host._CORE_KILLED.search(told)) is killed
