"""Engines of the fake backend in a home of the test; none is left behind."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.engine.jobs import GenerateJob
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.store.conftest import small_volume  # noqa: F401

LAYER_IDS, HIDDEN = (1, 2, 4), 8


def processes_that_mention(text: str) -> list[psutil.Process]:
    """Living processes with `text` in their command line."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            mentions = any(text in argument for argument in process.cmdline())
            if mentions and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture(autouse=True)
def _fake_engine_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr("eagle3_pipeline.engine.manager._PATIENCE_S", (0.5, 2.0))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """`EAGLE3_HOME`; at the end every engine in it is stopped, and must be able to stop."""
    folder = tmp_path / "home"
    yield folder
    EngineManager(folder, 0).stop_all(lambda _: None)
    deadline = time.monotonic() + 10
    while (left := processes_that_mention(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.05)
    commands = [" ".join(process.cmdline()) for process in left]
    for process in left:
        process.kill()
    assert not left, f"left behind: {commands}"


@pytest.fixture
def manager(home: Path) -> EngineManager:
    """The manager of a machine with one CPU slot."""
    return EngineManager(home, 0)


@pytest.fixture
def log() -> list[str]:
    """What a manager told its caller: `manager.acquire(spec, log.append)`."""
    return []


def engine_spec(**changes: Any) -> EngineSpec:
    fields: dict[str, Any] = {
        "model_path": "no-such-model",
        "model_id": "m",
        "dtype": "float32",
        "trust_remote_code": False,
        "max_model_len": 64,
        "idle_timeout_s": 120.0,
        "lease_timeout_s": 60.0,
        "backend": FAKE_BACKEND,
    }
    return EngineSpec(**fields | changes)


def capturing_spec(**changes: Any) -> EngineSpec:
    return engine_spec(**{"layer_ids": LAYER_IDS, "hidden_size": HIDDEN, "max_shard_bytes": 1 << 20} | changes)


PROMPTS = {f"s{i}": [i + 1, 2 * i + 3, 5, i][: 2 + i % 3] for i in range(6)}
JobMaker = Callable[..., GenerateJob]


@pytest.fixture
def make_job(tmp_path: Path) -> JobMaker:
    """Writes the prompts and names the journal of a job."""

    def make(
        name: str = "job", prompts: dict[str, list[int]] | None = None, capture: bool = False, **changes: Any
    ) -> GenerateJob:
        rows = [{"sequence_id": k, "input_ids": v} for k, v in (PROMPTS if prompts is None else prompts).items()]
        schema = pa.schema([("sequence_id", pa.string()), ("input_ids", pa.list_(pa.int32()))])
        pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / f"{name}.parquet")
        fields: dict[str, Any] = {
            "prompts": str(tmp_path / f"{name}.parquet"),
            "journal": str(tmp_path / f"{name}.jsonl"),
            "sampling": {"temperature": 0.0, "max_tokens": 5, "stop_token_ids": []},
            "capture_folder": str(tmp_path / f"{name}-states") if capture else "",
            "include_output": capture,
        }
        return GenerateJob(**fields | changes)

    return make


def journal_rows(job: GenerateJob) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(job.journal).read_text().splitlines()]
