"""Work of our own around the engine: imports, cache hits, planning."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import load_pipeline
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

NUM_CHUNKS = 500
REPEATS = 20


def run() -> dict[str, Any]:
    """Milliseconds of loading the definitions, of a fresh partition, of planning a chunk."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        found = {"loading the definitions (ms)": _definitions_ms()}
        context = _pipeline(folder)
        keys = context.all_chunks()
        started = time.monotonic()
        for key in keys:
            materialise_dataset(context, key)
        found["dataset of a chunk of 10 rows (ms)"] = (time.monotonic() - started) * 1000 / len(keys)
        started = time.monotonic()
        for key in keys[:REPEATS]:
            materialise_dataset(context, key)
        found["fresh partition (ms)"] = (time.monotonic() - started) * 1000 / REPEATS
        started = time.monotonic()
        rows = len(plan(context).rows)
        found[f"plan of {len(keys)} chunks, {rows} lines (ms)"] = (time.monotonic() - started) * 1000
        return found


def _definitions_ms() -> float:
    code = "import time; t = time.monotonic(); import eagle3_pipeline.definitions; print(time.monotonic() - t)"
    return 1000 * float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def _pipeline(folder: Path) -> StageContext:
    make_tiny_llama(folder / "model")
    rows = [json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(NUM_CHUNKS * 10)]
    (folder / "rows.jsonl").write_text("".join(rows))
    os.environ.setdefault("EAGLE3_HOME", str(folder))
    (folder / "bench.yaml").write_text(
        f"verifier: {{model: {folder}/model}}\n"
        f"dataset: {{path: {folder}/rows.jsonl, samples_per_chunk: 10}}\n"
        "generation: {max_new_tokens: 16, max_sequence_tokens: 64}\n"
        "training: {batch_tokens: 64}\n"
    )
    spec = load_pipeline(folder / "bench.yaml")
    context = StageContext(spec, log=lambda _line: None, home=folder / "home")
    context.registry.sync(spec)
    return context
