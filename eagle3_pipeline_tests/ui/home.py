"""A pipeline of six chunks, each a file of its own, on the fake engine, behind a running `dagster dev`."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.dagster_dev import REPOSITORY, DagsterDev
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.store.children import wait_until
from eagle3_pipeline_tests.tiny_model import VOCAB_SIZE, make_tiny_llama

NAME = "chats"
CHUNKS = [f"{i:06d}" for i in range(6)]
PIPELINE: dict[str, dict[str, Any]] = {
    "verifier": {"model": "${EAGLE3_HOME}/tiny", "dtype": "float32"},
    "dataset": {"path": "${EAGLE3_HOME}/data/*.jsonl", "samples_per_chunk": 4},
    "generation": {"max_new_tokens": 6, "max_sequence_tokens": 96},
    # The fake engine's states are not those of any model, but they follow from the tokens: a draft can learn them.
    "capture": {"min_next_token_agreement": 0.0},
    "vocab": {"draft_vocab_size": VOCAB_SIZE},
    "training": {"epochs": 5, "lr": 3.0e-3, "batch_tokens": 96, "validation_fraction": 0.2, "num_threads": 1},
    "evaluation": {"prompts": "${EAGLE3_HOME}/prompts.jsonl", "max_new_tokens": 6},
    "resources": {"num_gpus": 0},
}
# Sensors look every 30 s.
_SENSORS_S = 120.0
_ASSET = """
query($key: AssetKeyInput!) {
  assetNodeOrError(assetKey: $key) {
    ... on AssetNode {
      partitionKeys
      staleStatusByPartition
      assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions } }
    }
  }
}
"""
_RUNS = """
query($filter: RunsFilter!) {
  runsOrError(filter: $filter) { ... on Runs { results { runId status parentRunId tags { key value } } } }
}
"""


def environment(path: Path) -> dict[str, str]:
    """What the server, its runs and the tests share."""
    return {
        "EAGLE3_HOME": str(path),
        "EAGLE3_PIPELINES": str(path / "pipelines"),
        "EAGLE3_ENABLED": NAME,
        "EAGLE3_ENGINE_BACKEND": FAKE_BACKEND,
        "EAGLE3_FAKE_GATES": str(path / "gates"),
        "DAGSTER_HOME": str(path / "dagster_home"),
        "PYTHONPATH": str(REPOSITORY),
    }


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a JSONL file."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_home(path: Path) -> None:
    """Model, source, prompts and pipeline file."""
    for name in ("data", "gates", "pipelines"):
        (path / name).mkdir()
    make_tiny_llama(path / "tiny")
    for i in range(len(CHUNKS)):
        write_rows(path / "data" / f"day{i}.jsonl", [{"prompt": f"question {j} of day {i}"} for j in range(4)])
    write_rows(path / "prompts.jsonl", [{"category": c, "prompt": f"{c} one"} for c in ("river", "stone")])
    (path / "pipelines" / f"{NAME}.yaml").write_text(yaml.safe_dump(PIPELINE))


@dataclass
class Home:
    """The pipeline's folder and its server. What it tells comes from GraphQL or the store, not from a page."""

    path: Path
    server: DagsterDev

    @property
    def context(self) -> StageContext:
        """The stage context of the pipeline."""
        return StageContext(find_pipeline(NAME))

    def eagle3(self, *arguments: str) -> str:
        """Runs a command as people do in a terminal; returns what it prints."""
        command = [sys.executable, "-m", "eagle3_pipeline.cli", *arguments]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def edit_rows(self, chunk: str, **keys: Any) -> None:
        """Adds or replaces keys of the first row of a chunk's file."""
        path = self.path / "data" / f"day{int(chunk)}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        write_rows(path, [rows[0] | keys, *rows[1:]])

    def _asset(self, stage: str) -> dict[str, Any]:
        return self.server.graphql(_ASSET, key={"path": [NAME, stage]})["assetNodeOrError"]

    def materialised(self, stage: str) -> set[str]:
        """Chunks of which Dagster has a materialisation."""
        return set(self._asset(stage)["assetPartitionStatuses"]["materializedPartitions"])

    def stale(self, stage: str) -> set[str]:
        """Chunks that Dagster calls stale; the page calls them unsynced."""
        found = self._asset(stage)
        pairs = zip(found["partitionKeys"], found["staleStatusByPartition"], strict=True)
        return {key for key, status in pairs if status == "STALE"}

    def wait_for_stale(self, stage: str) -> set[str]:
        """Waits for a chunk to become stale; returns those that are then."""
        deadline = time.monotonic() + _SENSORS_S
        while not (found := self.stale(stage)) and time.monotonic() < deadline:
            time.sleep(1.0)
        return found

    def run(self, run_id: str) -> dict[str, Any]:
        """Status, parent and tags of a run."""
        (found,) = self.server.graphql(_RUNS, filter={"runIds": [run_id]})["runsOrError"]["results"]
        return found

    def runs_of_backfill(self, backfill: str) -> list[dict[str, Any]]:
        """The runs that a backfill launched."""
        tags = [{"key": "dagster/backfill", "value": backfill}]
        return self.server.graphql(_RUNS, filter={"tags": tags})["runsOrError"]["results"]

    def published(self, stage: str) -> set[str]:
        """Fingerprints of the stage's whole artifacts, of any chunk."""
        return {path.parent.name for path in (self.path / "store" / "objects" / stage).glob("*/manifest.json")}

    def num_starts(self) -> int:
        """Engine starts so far."""
        return len(self.context.engines.starts())

    def close_gate(self) -> None:
        """From now on the engine holds every request."""
        (self.path / "gates" / "answers.reached").unlink(missing_ok=True)
        (self.path / "gates" / "answers.closed").write_text("0")

    def wait_at_gate(self) -> None:
        """Waits until a request is held."""
        wait_until((self.path / "gates" / "answers.reached").exists, timeout_s=90)

    def open_gate(self) -> None:
        """Lets requests pass."""
        (self.path / "gates" / "answers.closed").unlink(missing_ok=True)
