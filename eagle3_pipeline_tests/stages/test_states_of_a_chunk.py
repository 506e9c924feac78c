"""States of a chunk on their way to the store: what is read back of them, and what a manifest says."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages import verifier_outputs
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs
from eagle3_pipeline.store import records
from eagle3_pipeline.store.shards import shard_name
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageContext]:
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
    make_tiny_llama(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"tell {i}"}) + "\n" for i in range(5)))
    spec = PipelineSpec.model_validate(
        {
            "name": "states",
            "verifier": {"model": str(tmp_path / "tiny")},
            "dataset": {"path": str(tmp_path / "rows.jsonl"), "samples_per_chunk": 5},
            "generation": {"max_new_tokens": 6, "max_sequence_tokens": 96},
            "vocab": {"draft_vocab_size": 64},
            "capture": {"min_next_token_agreement": 0.0},
            "training": {"batch_tokens": 96},
            "resources": {"num_gpus": 0},
        }
    )
    made = StageContext(spec, lambda _line: None, tmp_path / "home", num_gpus=0)
    made.registry.sync(spec)
    materialise_dataset(made, "000000")
    yield made
    made.engines.stop_all(lambda _line: None)


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    real = records.rows_checksum

    def noted(path: Path, *place: int) -> str:
        read.append(path.name)
        return real(path, *place)

    monkeypatch.setattr(records, "rows_checksum", noted)
    return read


def test_no_row_is_read_back_between_the_engine_and_the_manifest(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = _count_reads(monkeypatch)
    made = materialise_outputs(context, "000000").hidden_states
    assert made and made.manifest.metrics["one_pass"] == 1.0
    assert "recapture_difference" in made.manifest.metrics, "nor is the sequence that is captured alone"
    assert read == []
    assert made.manifest.files[shard_name(0)].xxh3.startswith("rows:")
    context.store.verify(made.artifact)


def test_what_an_earlier_process_left_is_compared_with_its_checksums(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = _count_reads(monkeypatch)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(verifier_outputs, "_materialise_states", end)
        with pytest.raises(KeyboardInterrupt):
            materialise_outputs(context, "000000")
    assert read == []
    made = materialise_outputs(context, "000000").hidden_states
    assert made and made.manifest.metrics["one_pass"] == 1.0
    assert read == [shard_name(0)] * 5
