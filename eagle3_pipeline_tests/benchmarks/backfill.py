"""Backfills through the real daemon, on the fake engine: how many loads do scattered chunks cost?"""

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from eagle3_pipeline.assets.launch import open_instance, sync_chunks
from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier import materialise_verifier
from eagle3_pipeline_tests.dagster_dev import DagsterDev, dagster_dev
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

LOAD_S = "5"
NUM_CHUNKS = 40
_TIMEOUT_S = 900.0


def run() -> dict[str, Any]:
    """Engine starts and seconds of three backfills."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        environment = {
            "EAGLE3_HOME": str(home),
            "EAGLE3_PIPELINES": str(home / "pipelines"),
            "EAGLE3_ENABLED": "first,second",
            "EAGLE3_ENGINE_BACKEND": FAKE_BACKEND,
            "EAGLE3_FAKE_LOAD_S": LOAD_S,
            "DAGSTER_HOME": str(home / "dagster_home"),
        }
        saved = dict(os.environ)
        os.environ.update(environment)
        try:
            _prepare(home)
            with dagster_dev(environment, home / "dev.log") as server:
                return _measure(server)
        finally:
            StageContext(find_pipeline("first"), print).engines.stop_all(lambda _line: None)
            os.environ.clear()
            os.environ.update(saved)


def _prepare(home: Path) -> None:
    make_tiny_llama(home / "tiny")
    (home / "data").mkdir()
    rows = [json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(NUM_CHUNKS * 4)]
    (home / "data" / "rows.jsonl").write_text("".join(rows))
    (home / "pipelines").mkdir()
    for name, dtype in (("first", "float32"), ("second", "bfloat16")):
        pipeline = {
            "verifier": {"model": str(home / "tiny"), "dtype": dtype},
            "dataset": {"path": str(home / "data" / "*.jsonl"), "samples_per_chunk": 4},
            "generation": {"max_new_tokens": 8, "max_sequence_tokens": 96},
            "capture": {"min_next_token_agreement": 0.0},
            "training": {"batch_tokens": 96},
            "resources": {"num_gpus": 0},
        }
        (home / "pipelines" / f"{name}.yaml").write_text(yaml.safe_dump(pipeline))
        spec = find_pipeline(name)
        with open_instance() as instance:
            sync_chunks(spec, instance, lambda _line: None)
        context = StageContext(spec, lambda _line: None)
        materialise_verifier(context)
        for key in context.all_chunks():
            materialise_dataset(context, key)


def _measure(server: DagsterDev) -> dict[str, Any]:
    engines = StageContext(find_pipeline("first"), print).engines
    keys = [f"{i:06d}" for i in range(NUM_CHUNKS)]
    both = (ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES)
    found: dict[str, Any] = {}

    def measure(what: str, *backfills: tuple[str, tuple[str, ...], list[str]]) -> None:
        starts, began = len(engines.starts()), time.monotonic()
        launched = [server.backfill(*backfill) for backfill in backfills]
        statuses = {server.wait(backfill, _TIMEOUT_S) for backfill in launched}
        found[f"{what}: status"] = ", ".join(sorted(statuses))
        found[f"{what}: engine starts"] = len(engines.starts()) - starts
        found[f"{what}: seconds"] = time.monotonic() - began

    measure("20 scattered chunks, one pass", ("first", both, keys[::2]))
    # Other layers: the stored sequences are captured by prefill.
    path = Path(os.environ["EAGLE3_PIPELINES"]) / "first.yaml"
    pipeline = yaml.safe_load(path.read_text())
    measure("the other 20 of them", ("first", both, keys[1::2]))
    path.write_text(yaml.safe_dump(pipeline | {"capture": {**pipeline["capture"], "aux_layer_ids": [1, 3, 6]}}))
    measure("40 chunks, capture only", ("first", (ids.HIDDEN_STATES,), keys))
    path.write_text(yaml.safe_dump(pipeline | {"generation": {**pipeline["generation"], "max_new_tokens": 9}}))
    measure("two engines, 20 chunks each", ("first", both, keys[:20]), ("second", both, keys[:20]))
    return found
