"""A store filled by hand: real verifier, registry and dataset stages, small artifacts for the rest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.draft_evaluation import EVALUATION, EVALUATION_SCHEMA
from eagle3_pipeline.stages.published_draft import publish_draft
from eagle3_pipeline.stages.verifier import materialise_verifier
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.objects import Artifact

ContextMaker = Callable[..., StageContext]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A verifier of 12 layers."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 12, "hidden_size": 8, "vocab_size": 40}))
    save_file({"w": np.ones(4, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def write_source(folder: Path, name: str, texts: list[str]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Two files: two chunks and one."""
    folder = tmp_path / "source"
    write_source(folder, "a", ["a0", "a1", "a2", "a3"])
    write_source(folder, "b", ["b0"])
    return folder


@pytest.fixture
def make_context(tmp_path: Path, model: Path, source: Path) -> ContextMaker:
    """A pipeline in the test's home; keywords are sections that replace the defaults."""

    def make(name: str = "p", **sections: dict[str, Any]) -> StageContext:
        content: dict[str, Any] = {
            "name": name,
            "verifier": {"model": str(model), **sections.pop("verifier", {})},
            "dataset": {"path": str(source / "*.jsonl"), "samples_per_chunk": 2, **sections.pop("dataset", {})},
            "resources": {"num_gpus": 0, **sections.pop("resources", {})},
            **sections,
        }
        return StageContext(PipelineSpec.model_validate(content), lambda _: None, tmp_path / "home")

    return make


def _publish(context: StageContext, identity: Identity, chunk: str | None, **produced: Any) -> Artifact:
    def produce(writer: Any) -> Produced:
        (writer.folder / "data.bin").write_bytes(b"0123456789")
        return Produced(digest([identity.stage, identity.inputs, identity.spec]), **produced)

    return context.materialise(identity, chunk, produce).artifact


def fill(context: StageContext, lengths: dict[str, float] | None = None) -> None:
    """Materialises all stages; what engine and training would make is ten bytes a stage.

    Args:
        context: the pipeline.
        lengths: acceptance lengths of the evaluation, by category.
    """
    spec, verifier = context.spec, context.verifier
    materialise_verifier(context)
    context.registry.sync(spec)
    generations: dict[str, Artifact] = {}
    states: dict[str, Artifact] = {}
    for key in context.all_chunks():
        content = materialise_dataset(context, key).manifest.content_id
        identity = ids.generations_identity(spec, verifier, content)
        parts = {name: digest([name, identity.fingerprint]) for name in ("input_ids", "token_counts")}
        generations[key] = _publish(context, identity, key, content_ids=parts)
        states[key] = _publish(context, ids.hidden_states_identity(spec, verifier, parts["input_ids"]), key)
    counts = {key: artifact.manifest.content_ids["token_counts"] for key, artifact in generations.items()}
    vocab = _publish(context, ids.vocab_identity(spec, verifier, counts), None, metrics={"coverage": 0.75})
    prompts = _prompt_bytes(spec.evaluation.prompts)
    baseline = _publish(context, ids.baseline_identity(spec, verifier, prompts), None)
    contents = [{key: a.manifest.content_id for key, a in of.items()} for of in (generations, states)]
    identity = ids.checkpoint_identity(spec, verifier, vocab.manifest.content_id, *contents)
    checkpoint = _publish(context, identity, None)
    identity = ids.evaluation_identity(spec, checkpoint.manifest.content_id, baseline.manifest.content_id)
    _publish_evaluation(context, identity, lengths or {"chat": 2.0})
    publish_draft(context)


def _publish_evaluation(context: StageContext, identity: Identity, lengths: dict[str, float]) -> Artifact:
    """An evaluation with these acceptance lengths by category, one prompt each; the pool is their mean."""
    pooled = sum(lengths.values()) / len(lengths)
    rows = [evaluation_row(category, length) for category, length in {**lengths, "all": pooled}.items()]

    def produce(writer: Any) -> Produced:
        pq.write_table(pa.Table.from_pylist(rows, EVALUATION_SCHEMA), writer.folder / EVALUATION)
        metrics = {"acceptance_length": pooled}
        metrics |= {f"{name}_accepted_per_draft": pooled - 1 for name in ("served", "simulated", "untrained")}
        return Produced(digest([identity.inputs, identity.spec, lengths]), metrics)

    return context.materialise(identity, None, produce).artifact


def evaluation_row(category: str, length: float) -> dict[str, Any]:
    """A row of `evaluation.parquet`."""
    return {
        "category": category,
        "num_prompts": 1,
        "num_new_tokens": 10,
        "num_drafts": 5,
        "accepted_per_position": [4, 1],
        "acceptance_rates": [0.8, 0.2],
        "conditional_rates": [0.8, 0.25],
        "acceptance_length": length,
        "tokens_per_s": 30.0,
        "baseline_tokens_per_s": 20.0,
        "speed_up": 1.5,
        "num_differences": 0,
        "num_near_ties": 0,
    }


def _prompt_bytes(location: str) -> bytes:
    import eagle3_pipeline.evaluation

    assert location == "builtin:demo"
    return (Path(eagle3_pipeline.evaluation.__file__).parent / "demo_prompts.jsonl").read_bytes()
