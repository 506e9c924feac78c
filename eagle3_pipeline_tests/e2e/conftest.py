"""One pipeline on a tiny random Llama with real vLLM, run once for all tests of this folder."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
import yaml

from eagle3_pipeline.assets import launch
from eagle3_pipeline.config import PipelineSpec, find_pipeline
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

WORDS = ("river", "stone", "lamp", "paper", "cloud", "engine", "garden", "winter")
PIPELINE: dict[str, dict] = {
    "verifier": {"model": "${EAGLE3_HOME}/models/tiny", "dtype": "float32"},
    "dataset": {"path": "${EAGLE3_HOME}/data/*.jsonl", "samples_per_chunk": 12},
    "generation": {"max_new_tokens": 24, "max_sequence_tokens": 128},
    "vocab": {"draft_vocab_size": 160, "min_coverage": 0.5},
    "training": {
        "epochs": 2,
        "lr": 3.0e-3,
        "batch_tokens": 256,
        "validation_fraction": 0.2,
        "min_validation_samples": 4,
        "num_threads": 1,
    },
    "evaluation": {
        "prompts": "${EAGLE3_HOME}/prompts.jsonl",
        "max_new_tokens": 16,
        "batch_size": 2,
        "other_batch_sizes": [1],
    },
    "resources": {"num_gpus": 0, "max_num_seqs": 16, "max_num_batched_tokens": 512, "cpu_kvcache_gib": 1.0},
}


@dataclass
class Home:
    """A scratch `EAGLE3_HOME` with pipelines."""

    path: Path
    instance: dg.DagsterInstance

    def write_pipeline(self, name: str, **sections: dict) -> PipelineSpec:
        """Writes a pipeline file: the base with some keys changed."""
        data = {k: {**v, **sections.get(k, {})} for k, v in PIPELINE.items()}
        data |= {k: v for k, v in sections.items() if k not in data}
        (self.path / "pipelines" / f"{name}.yaml").write_text(yaml.safe_dump(data))
        return find_pipeline(name)

    def context(self, spec: PipelineSpec) -> StageContext:
        """The pipeline's stage context."""
        return StageContext(spec)

    def sync(self, spec: PipelineSpec) -> None:
        """Registers the chunks."""
        launch.sync_chunks(spec, self.instance, print)

    def materialise(self, spec: PipelineSpec) -> launch.Launched:
        """Runs what is not fresh."""
        return launch.materialise_stale(spec, launch.InProcess(build_definitions([spec]), self.instance, print), print)


@contextmanager
def open_home(path: Path) -> Iterator[Home]:
    """An empty home; every engine is stopped at the end."""
    saved = {k: os.environ.get(k) for k in ("EAGLE3_HOME", "EAGLE3_PIPELINES", "DAGSTER_HOME")}
    os.environ["EAGLE3_HOME"] = str(path)
    os.environ["EAGLE3_PIPELINES"] = str(path / "pipelines")
    (path / "pipelines").mkdir()
    (path / "data").mkdir()
    with launch.open_instance() as instance:
        made = Home(path, instance)
        try:
            yield made
        finally:
            made.context(made.write_pipeline("tiny")).engines.stop_all(print)
            for key, value in saved.items():
                os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Model, data and prompts."""
    with open_home(tmp_path_factory.mktemp("home")) as made:
        make_tiny_llama(made.path / "models" / "tiny")
        rows = [{"prompt": f"tell {a} of {b}"} for a in WORDS[:4] for b in WORDS[:6]]
        (made.path / "data" / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        prompts = [{"category": c, "prompt": f"{c} {w}"} for c in ("first", "second") for w in WORDS[:3]]
        (made.path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in prompts))
        yield made


@pytest.fixture(scope="session")
def tiny(home: Home) -> PipelineSpec:
    """The base pipeline with its chunks registered."""
    spec = home.write_pipeline("tiny")
    home.sync(spec)
    return spec
