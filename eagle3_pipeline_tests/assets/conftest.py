"""A pipeline on the fake engine and a Dagster instance in memory."""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from eagle3_pipeline.assets import launch
from eagle3_pipeline.assets.common import asset_key
from eagle3_pipeline.config import PipelineSpec, find_pipeline
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

BASE: dict[str, dict[str, Any]] = {
    "verifier": {"model": "${EAGLE3_HOME}/tiny"},
    "dataset": {"path": "${EAGLE3_HOME}/data/*.jsonl", "samples_per_chunk": 4},
    "generation": {"max_new_tokens": 6, "max_sequence_tokens": 96},
    # The fake engine's states are not those of any model.
    "capture": {"min_next_token_agreement": 0.0},
    "vocab": {"draft_vocab_size": 64, "min_coverage": 0.1},
    "training": {"batch_tokens": 96},
    "resources": {"num_gpus": 0},
}


@dataclass
class Pipeline:
    """One pipeline in a scratch home."""

    home: Path
    name: str = "fake"
    instance: dg.DagsterInstance = field(default_factory=dg.DagsterInstance.ephemeral)

    def __post_init__(self) -> None:
        (self.home / "pipelines").mkdir(exist_ok=True)
        (self.home / "data").mkdir(exist_ok=True)
        self.configure()

    def configure(self, **sections: dict[str, Any]) -> None:
        """Writes the pipeline file: the base with some keys changed."""
        data = {key: {**BASE.get(key, {}), **sections.get(key, {})} for key in {**BASE, **sections}}
        (self.home / "pipelines" / f"{self.name}.yaml").write_text(yaml.safe_dump(data))

    @property
    def spec(self) -> PipelineSpec:
        """The current settings."""
        return find_pipeline(self.name)

    @property
    def context(self) -> StageContext:
        """The current stage context."""
        return StageContext(self.spec)

    def write_rows(self, name: str, prompts: list[str]) -> None:
        """Writes a source file of plain prompts."""
        rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
        (self.home / "data" / name).write_text("".join(rows))

    def sync(self) -> None:
        """Registers chunks."""
        launch.sync_chunks(self.spec, self.instance, print)

    def run(self, job: str, chunk: str | None = None, *stages: str) -> dg.ExecuteInProcessResult:
        """Runs a job of the code location, or some of its stages."""
        definitions = build_definitions([self.spec])
        return definitions.resolve_job_def(f"{self.name}__{job}").execute_in_process(
            instance=self.instance,
            partition_key=chunk,
            asset_selection=[asset_key(self.spec, stage) for stage in stages] or None,
            raise_on_error=False,
        )

    def run_chunk(self, chunk: str) -> None:
        """Both partitioned jobs of a chunk."""
        for job in ("prepare_data", "generate_and_capture"):
            result = self.run(job, chunk)
            assert result.success, result.all_events

    def status(self, stage: str, chunk: str | None = None) -> StaleStatus:
        """Dagster's own opinion."""
        graph = build_definitions([self.spec]).resolve_asset_graph()
        resolver = CachingStaleStatusResolver(self.instance, graph, LoadingContextForTest(self.instance))
        return resolver.get_status(asset_key(self.spec, stage), chunk)

    def num_starts(self) -> int:
        """Engine starts so far."""
        return len(self.context.engines.starts())


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The verifier's folder."""
    return make_tiny_llama(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def pipeline(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """Two files of four rows: chunks 000000 and 000001."""
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path))
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path / "pipelines"))
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
    shutil.copytree(tiny_model, tmp_path / "tiny")
    made = Pipeline(tmp_path)
    made.write_rows("a.jsonl", ["one", "two", "three", "four"])
    made.write_rows("b.jsonl", ["five", "six", "seven", "eight"])
    made.sync()
    assert made.run("resolve_verifier").success
    yield made
    made.context.engines.stop_all(print)
