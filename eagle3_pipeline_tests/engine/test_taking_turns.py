"""Two pipelines on one device: engines change hands when work is done, not at every chunk."""

import threading
import time
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(("after_chunks", "patience"), [(True, 0.25), (False, 1.5)])
def test_who_comes_after_the_chunks_takes_over_sooner(
    manager: EngineManager, monkeypatch: pytest.MonkeyPatch, after_chunks: bool, patience: float
) -> None:
    monkeypatch.setattr("eagle3_pipeline.engine.manager._PATIENCE_S", (1.5, 1.5))
    monkeypatch.setattr("eagle3_pipeline.engine.manager._SAME_MODEL_PATIENCE_S", 0.25)
    request, asked = EngineClient.request, set()

    def noting(client: EngineClient, operation: str, *args: Any, **fields: Any) -> Any:
        if operation == "retire":
            asked.add(fields["idle_s"])
        return request(client, operation, *args, **fields)

    monkeypatch.setattr(EngineClient, "request", noting)
    manager.acquire(engine_spec(), lambda _line: None).close()
    manager.acquire(engine_spec(max_num_seqs=7), lambda _line: None, after_chunks=after_chunks).close()
    assert asked == {patience}
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
