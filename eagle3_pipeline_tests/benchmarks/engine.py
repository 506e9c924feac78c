"""What the host costs around an engine: the fake one answers at once."""

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import load_pipeline
from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.jobs import GenerateJob
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

NUM_REQUESTS = 200
NUM_WARM_UP = 20
NUM_PROMPTS = 64
PROMPT_TOKENS = 32
MAX_NEW_TOKENS = 16
NUM_CHUNKS = 20


def run() -> dict[str, Any]:
    """Milliseconds per chunk request, growth of the host's memory, engine starts of 20 chunks."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        manager = EngineManager(folder / "home", 0)
        try:
            for name, captures in (("answers", False), ("answers and states", True)):
                found |= _requests(manager, folder / name.replace(" ", "-"), name, captures)
        finally:
            manager.stop_all(_quiet)
        found |= _chunks(folder)
    return found


def _quiet(_line: str) -> None: ...


def _spec(captures: bool) -> EngineSpec:
    capture: dict[str, Any] = {"layer_ids": (2, 4, 5, 8), "hidden_size": 128, "max_shard_bytes": 1 << 30}
    return EngineSpec(
        model_path="no-such-model",
        model_id="none",
        dtype="float32",
        trust_remote_code=False,
        max_model_len=PROMPT_TOKENS + MAX_NEW_TOKENS + 1,
        backend=FAKE_BACKEND,
        **(capture if captures else {}),
    )


def _job(folder: Path, number: int, captures: bool) -> GenerateJob:
    """Prompts of a chunk, written before its time is taken."""
    ids = [[(number + row + column) % 100 for column in range(PROMPT_TOKENS)] for row in range(NUM_PROMPTS)]
    schema = pa.schema([("sequence_id", pa.string()), ("input_ids", pa.list_(pa.int32()))])
    rows = [{"sequence_id": f"s{row}", "input_ids": tokens} for row, tokens in enumerate(ids)]
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / f"{number}.parquet")
    return GenerateJob(
        prompts=str(folder / f"{number}.parquet"),
        journal=str(folder / f"{number}.jsonl"),
        sampling={"temperature": 0.0, "max_tokens": MAX_NEW_TOKENS, "stop_token_ids": []},
        capture_folder=str(folder / f"{number}-states") if captures else "",
        include_output=captures,
    )


def _requests(manager: EngineManager, folder: Path, name: str, captures: bool) -> dict[str, Any]:
    folder.mkdir()
    with manager.acquire(_spec(captures), _quiet) as client:
        host = psutil.Process(client.request("info")["pid"])
        info_ms = _info_ms(client)
        in_backend = client.request("counters")["busy_s"]
        walls, memory, cpu_s = [], [], sum(host.cpu_times()[:2])
        for number in range(NUM_REQUESTS):
            job = _job(folder, number, captures)
            started = time.monotonic()
            client.generate(job)
            walls.append(time.monotonic() - started)
            memory.append(host.memory_info().rss)
        in_backend = client.request("counters")["busy_s"] - in_backend
        cpu_s = sum(host.cpu_times()[:2]) - cpu_s
    backend_ms = 1000 * in_backend / NUM_REQUESTS
    # On a busy machine the median says more of the work than the mean.
    wall_ms = 1000 * statistics.median(walls)
    start, end = memory[NUM_WARM_UP], memory[-1]
    return {
        f"{name}: a request without work (ms)": info_ms,
        f"{name}: a chunk of {NUM_PROMPTS} prompts, median (ms)": wall_ms,
        f"{name}: a chunk of {NUM_PROMPTS} prompts, mean (ms)": 1000 * statistics.mean(walls),
        f"{name}: of the median not in the backend (ms)": wall_ms - backend_ms,
        f"{name}: the host's CPU time of a chunk (ms)": 1000 * cpu_s / NUM_REQUESTS,
        f"{name}: host after {NUM_WARM_UP} chunks (MiB)": start / 2**20,
        f"{name}: host's growth over {NUM_REQUESTS} chunks (%)": 100 * (end / memory[0] - 1),
        f"{name}: of it after the first {NUM_WARM_UP} (%)": 100 * (end / start - 1),
    }


def _info_ms(client: EngineClient) -> float:
    started = time.monotonic()
    for _ in range(NUM_REQUESTS):
        client.request("info")
    return (time.monotonic() - started) * 1000 / NUM_REQUESTS


def _chunks(folder: Path) -> dict[str, Any]:
    """Both outputs of 20 chunks, one context each as in 20 runs."""
    make_tiny_llama(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"q {i}"}) + "\n" for i in range(NUM_CHUNKS * 4)))
    (folder / "bench.yaml").write_text(
        f"verifier: {{model: {folder}/model}}\n"
        f"dataset: {{path: {folder}/rows.jsonl, samples_per_chunk: 4}}\n"
        "generation: {max_new_tokens: 8, max_sequence_tokens: 96}\n"
        "capture: {min_next_token_agreement: 0.0}\n"
        "training: {batch_tokens: 96}\n"
        "resources: {num_gpus: 0}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
        return _materialise_all(folder)


def _materialise_all(folder: Path) -> dict[str, Any]:
    spec = load_pipeline(folder / "bench.yaml")

    def context() -> StageContext:
        return StageContext(spec, log=_quiet, home=folder / "home")

    context().registry.sync(spec)
    keys, before = context().all_chunks(), len(context().engines.starts())
    for key in keys:
        materialise_dataset(context(), key)
    started = time.monotonic()
    try:
        for key in keys:
            materialise_outputs(context(), key)
        seconds = time.monotonic() - started
        num_starts = len(context().engines.starts()) - before
    finally:
        context().engines.stop_all(_quiet)
    return {
        f"engine starts of {len(keys)} chunk runs": num_starts,
        "outputs of a chunk of 4 prompts, start included (ms)": 1000 * seconds / len(keys),
    }
