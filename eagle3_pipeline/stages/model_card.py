"""The folder that users serve: links to the checkpoint's files, and a model card that says what the draft is."""

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from eagle3_pipeline.evaluation.card import CardFacts, model_card
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import Champion, Contender
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_checkpoint import CURVES
from eagle3_pipeline.stages.draft_evaluation import EVALUATION
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.manifest import MANIFEST_NAME, Manifest
from eagle3_pipeline.store.objects import Artifact

CARD = "README.md"
PROVENANCE = "provenance.json"
_DATA_COUNTS = ("num_read", "num_samples", "num_sequences", "num_tokens", "num_supervised_tokens", "num_truncated")


def write_published_folder(
    context: StageContext,
    folder: Path,
    checkpoint: Artifact,
    evaluation: Artifact,
    champion: Champion,
    before: Contender | None,
) -> None:
    """Fills `folder` anew: symbolic links to the checkpoint's files, `README.md`, `provenance.json`."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in checkpoint.manifest.files:
        link = partial / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(os.path.relpath(checkpoint.folder / name, (folder / name).parent))
    chunks = {stage: _chunk_manifests(context, stage, checkpoint.manifest) for stage in ids.CHUNK_STAGES}
    facts = _facts(context, checkpoint.manifest, evaluation, champion, chunks)
    facts.champion_before = {} if before is None else {"all": before.acceptance_length, **before.acceptance_by_category}
    (partial / CARD).write_text(model_card(facts), encoding="utf-8")
    atomic.write_json(partial / PROVENANCE, _provenance(context, checkpoint.manifest, evaluation.manifest, chunks))
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(partial, folder)
    atomic.fsync_path(folder.parent)


def _chunk_manifests(context: StageContext, stage: str, checkpoint: Manifest) -> dict[str, Manifest]:
    """Manifests of the chunks that the draft was trained on, as far as the pipeline still refers to them."""
    trained = checkpoint.inputs["synthetic_generations"]
    found = {}
    for chunk in trained:
        if manifest := context.last_manifest(stage, chunk):
            found[chunk] = manifest
    return found


def _facts(
    context: StageContext,
    checkpoint: Manifest,
    evaluation: Artifact,
    champion: Champion,
    chunks: dict[str, dict[str, Manifest]],
) -> CardFacts:
    spec = context.spec
    counts, rejected = Counter[str](), Counter[str]()
    for manifest in (*chunks[ids.DATASET].values(), *chunks[ids.SYNTHETIC_GENERATIONS].values()):
        counts.update({name: int(manifest.metrics[name]) for name in _DATA_COUNTS if name in manifest.metrics})
        rejected.update(manifest.rejected)
    vocabulary = _vocabulary(context, checkpoint)
    return CardFacts(
        pipeline=spec.name,
        verifier=spec.verifier.model,
        verifier_content=context.verifier.content_id,
        dataset=f"{spec.dataset.source}: {spec.dataset.path}",
        mode=spec.generation.mode,
        num_chunks=len(checkpoint.inputs["synthetic_generations"]),
        counts=dict(counts),
        rejected=dict(rejected),
        coverage=vocabulary.metrics["coverage"] if vocabulary else None,
        settings={**checkpoint.spec, "capture": spec.capture.semantic(), "vocab": spec.vocab.semantic()},
        training=dict(checkpoint.metrics),
        evaluation=pq.read_table(evaluation.path(EVALUATION)).to_pylist(),
        evaluation_metrics=dict(evaluation.manifest.metrics),
        decision=champion.reason,
        tools=evaluation.manifest.tools,
        fingerprints={
            ids.DRAFT_CHECKPOINT: checkpoint.fingerprint,
            ids.DRAFT_EVALUATION: evaluation.manifest.fingerprint,
            ids.VOCAB_MAP: vocabulary.fingerprint if vocabulary else "no longer there",
        },
        curves=CURVES if CURVES in checkpoint.files else "",
        num_speculative_tokens=spec.evaluation.num_speculative_tokens,
    )


def _vocabulary(context: StageContext, checkpoint: Manifest) -> Manifest | None:
    manifest = context.last_manifest(ids.VOCAB_MAP)
    return manifest if manifest and manifest.content_id == checkpoint.inputs["vocab_map"] else None


def _provenance(
    context: StageContext, checkpoint: Manifest, evaluation: Manifest, chunks: dict[str, dict[str, Manifest]]
) -> dict[str, Any]:
    """Every fingerprint that the draft goes back to, with the manifests of the draft and its evaluation."""
    return {
        "pipeline": context.spec.name,
        "verifier": {"model": context.spec.verifier.model, "content_id": context.verifier.content_id},
        ids.DRAFT_CHECKPOINT: checkpoint.model_dump(mode="json"),
        ids.DRAFT_EVALUATION: evaluation.model_dump(mode="json"),
        "chunks": {
            stage: {key: manifest.fingerprint for key, manifest in found.items()} for stage, found in chunks.items()
        },
        "manifest_file": MANIFEST_NAME,
    }
