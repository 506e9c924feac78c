"""Two pipelines on one device: engines change hands when work is done, not at every chunk."""

import threading
import time
from pathlib import Path

import pytest

from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline_tests.engine.conftest import JobMaker, engine_spec


def test_two_pipelines_load_once_each(
    manager: EngineManager, make_job: JobMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("eagle3_pipeline.engine.manager._PATIENCE_S", (1.5, 1.5))
    monkeypatch.setenv("EAGLE3_FAKE_DELAY_S", "0.05")
    first, second = engine_spec(), engine_spec(max_num_seqs=7)
    jobs = [make_job(journal=str(tmp_path / f"journal-{i}")) for i in range(8)]
    failures: list[BaseException] = []

    def work(spec: object, own: list) -> None:
        try:
            for job in own:
                with manager.acquire(spec, lambda _line: None) as client:  # type: ignore[arg-type]
                    client.generate(job)
                # What a run does between two chunks.
                time.sleep(0.3)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=work, args=(first, jobs[:4])),
        threading.Thread(target=work, args=(second, jobs[4:])),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert failures == []
    assert len(manager.starts()) == 2


@pytest.mark.parametrize("after_chunks", [True, False])
def test_who_comes_after_the_chunks_takes_over_at_once(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch, after_chunks: bool
) -> None:
    monkeypatch.setattr("eagle3_pipeline.engine.manager._PATIENCE_S", (4.0, 4.0))
    monkeypatch.setattr("eagle3_pipeline.engine.manager._SAME_MODEL_PATIENCE_S", 0.2)
    manager.acquire(engine_spec(), lambda _line: None).close()
    started = time.monotonic()
    manager.acquire(engine_spec(max_num_seqs=7), lambda _line: None, after_chunks=after_chunks).close()
    # Without patience a start of the fake engine takes a second or two.
    assert (time.monotonic() - started > 4.0) is not after_chunks
    assert len(manager.starts()) == 2


def test_looking_at_an_engine_does_not_keep_it_alive(manager: EngineManager) -> None:
    spec = engine_spec(idle_timeout_s=2.0)
    manager.acquire(spec, lambda _line: None).close()
    state = EngineState(manager.folder / spec.engine_id)
    deadline = time.monotonic() + 15
    while state.is_alive() and time.monotonic() < deadline:
        try:
            with EngineClient(state) as client:
                client.request("info")
        except Exception:
            break
        time.sleep(0.2)
    time.sleep(1.0)
    assert not state.is_alive()
