"""What a start tells those who wait, and the rehearsal with random weights."""

import json
import threading
from pathlib import Path

import pytest

from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline_tests.engine.conftest import engine_spec
from eagle3_pipeline_tests.store.children import wait_until


def test_progress_of_a_load_names_what_is_left_by_the_last_load(
    manager: EngineManager, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "2")
    monkeypatch.setattr("eagle3_pipeline.engine.manager._REPORT_EVERY_S", 0.5)
    manager.acquire(engine_spec(), log.append).close()
    assert not any("left" in line for line in log)
    assert any("engine loading for" in line for line in log)
    manager.stop_all(log.append)
    log.clear()
    # Other settings of the same model: its weights take as long.
    manager.acquire(engine_spec(max_num_seqs=2), log.append).close()
    assert "the last load of this model took 2 s" in log[0]
    left = [int(line.split("about ")[1].split(" s left")[0]) for line in log if " left" in line]
    assert left == sorted(left, reverse=True) and 1 <= left[0] <= 2


def test_who_waits_for_another_starter_is_told_so(
    manager: EngineManager, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "3")
    monkeypatch.setattr("eagle3_pipeline.store.atomic._REPORT_EVERY_S", 0.5)
    starter = threading.Thread(target=lambda: manager.acquire(engine_spec(), lambda _line: None).close())
    starter.start()
    wait_until(lambda: manager.starts() != [])
    manager.acquire(engine_spec(), log.append).close()
    starter.join(10)
    waiting = [line for line in log if "waiting for another run's start of it: engine loading for" in line]
    assert len(waiting) >= 2
    assert len(manager.starts()) == 1


def test_a_rehearsal_is_a_start_with_random_weights_that_leaves_nothing(manager: EngineManager) -> None:
    manager.rehearse(engine_spec(), lambda _line: None)
    assert [start["spec"] for start in manager.starts()] == ["no-such-model float32 with random weights"]
    assert not any(state.is_alive() for state in manager.engines())
    with manager.acquire(engine_spec(), lambda _line: None) as client:
        assert client.started


def test_a_failed_rehearsal_shows_the_log_and_the_next_fails_at_once(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "dummy")
    for _ in range(2):
        with pytest.raises(EngineError, match="was told not to start"):
            manager.rehearse(engine_spec(), lambda _line: None)
    assert len(manager.starts()) == 1


@pytest.mark.parametrize(
    ("load_s", "own_model", "expected_s"),
    [(0.1, False, 30.0), (45.0, False, 45.0), (1350.0, False, 120.0), (1350.0, True, 5.0)],
)
def test_an_idle_engine_waits_as_long_as_its_load_took_before_it_makes_room(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch, load_s: float, own_model: bool, expected_s: float
) -> None:
    """Between half a minute and two; at once (5 s) for whoever comes after the chunks of the same model."""
    monkeypatch.setattr("eagle3_pipeline.engine.manager._PATIENCE_S", (30.0, 120.0))
    asked: list[float] = []

    def request(client: EngineClient, operation: str, *_: object, **fields: float) -> dict[str, object]:
        asked.append(fields["idle_s"])
        return {"retired": False}

    manager.acquire(engine_spec(), lambda _line: None).close()
    state = EngineState(manager.folder / engine_spec().engine_id)
    (state.folder / "state.json").write_text(json.dumps({**state.read(), "load_s": load_s}))
    monkeypatch.setattr(EngineClient, "request", request)
    wanted = engine_spec(model_id="m" if own_model else "other", draft_path="draft", num_speculative_tokens=3)
    manager.retire_idle(lambda _line: None, wanted, after_chunks_of=wanted.model_id)
    monkeypatch.undo()
    assert asked == [expected_s]


def test_an_engine_imports_nothing_from_the_folder_it_is_called_in(
    manager: EngineManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "eagle3_pipeline").mkdir(parents=True)
    for name in ("random.py", "eagle3_pipeline/__init__.py"):
        (elsewhere / name).write_text("raise RuntimeError('a file of the folder that one works in')")
    monkeypatch.chdir(elsewhere)
    with manager.acquire(engine_spec(), lambda _line: None) as client:
        assert client.request("info")["pid"]
