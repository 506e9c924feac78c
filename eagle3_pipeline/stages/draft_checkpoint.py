"""The `draft_checkpoint` asset: trains the draft on all chunks in a worker process."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_pipeline.data.verifier import is_local
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.current import current_chunks
from eagle3_pipeline.stages.draft_spec import resolved_draft
from eagle3_pipeline.stages.progress import ProgressLog
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES
from eagle3_pipeline.stages.vocab_map import VOCAB_MAP_FILE
from eagle3_pipeline.stages.warm_start import WEIGHTS, warm_start_folder
from eagle3_pipeline.store.fingerprint import digest, file_checksum
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter
from eagle3_pipeline.workers import run_worker

WORKER = "eagle3_pipeline.training.worker"
TORCHRUN = "eagle3_pipeline.training.torchrun"
CURVES = "curves.png"
METRICS = "metrics.parquet"
CONFIG = "config.json"


def materialise_checkpoint(context: StageContext) -> StageResult:
    """Trains, or returns the checkpoint of the same data and settings.

    Raises:
        StaleInputError: too many chunks, or the vocabulary, are not materialised.
        TrainingError: with the worker's message or its log's tail.
    """
    chunks = current_chunks(context)
    sequences, states = chunks.generations, chunks.hidden_states
    vocab = context.upstream(ids.VOCAB_MAP)
    identity = ids.checkpoint_identity(
        context.spec, context.verifier, vocab.manifest.content_id, _contents(sequences), _contents(states)
    )

    def produce(writer: ArtifactWriter) -> Produced:
        folders = [
            {"chunk": key, "sequences": str(sequences[key].path(SEQUENCES)), "hidden_states": str(states[key].folder)}
            for key in states
        ]
        for artifact in states.values():
            context.store.verify(artifact)
        job = worker_job(context, vocab, folders)
        start = _warm_start(context)
        job |= {"job": "train", "output": str(writer.folder), "fingerprint": identity.fingerprint}
        job |= {"init_from": str(start) if start else None}
        result = run_training_worker(context, job, identity, "training", context.spec.training.num_processes)
        metrics = {k: float(v) for k, v in result["metrics"].items()}
        return Produced(_content_id(writer), metrics, provenance={"warm_start": start.name} if start else {})

    return context.materialise(identity, None, produce)


def _warm_start(context: StageContext) -> Path | None:
    folder = warm_start_folder(context)
    if folder is None and context.spec.training.warm_start == "champion":
        context.log("training.warm_start: there is no champion yet; starting from the seed")
    return folder


def _contents(artifacts: Mapping[str, Artifact]) -> dict[str, str]:
    return {key: artifact.manifest.content_id for key, artifact in artifacts.items()}


def _content_id(writer: ArtifactWriter) -> str:
    """Of the weights and the config; where the verifier lies on this machine does not enter."""
    config = json.loads((writer.folder / CONFIG).read_text())
    config["speculators_config"]["verifier"].pop("name_or_path")
    return digest([file_checksum(writer.folder / WEIGHTS), config])


def worker_job(context: StageContext, vocab: Artifact, chunks: list[dict[str, str]]) -> dict[str, Any]:
    """The part of a training worker's spec that training and simulation share."""
    spec, verifier = context.spec, context.verifier
    name = verifier.path if is_local(spec.verifier) else spec.verifier.model
    return {
        "verifier": {"path": verifier.path, "name": name, "trust_remote_code": spec.verifier.trust_remote_code},
        "aux_layer_ids": list(verifier.geometry(spec.capture).layer_ids[:-1]),
        "draft": resolved_draft(context).model_dump(mode="json"),
        "training": spec.training.model_dump(mode="json"),
        "vocab_map": str(vocab.path(VOCAB_MAP_FILE)),
        "chunks": chunks,
    }


def run_training_worker(
    context: StageContext, job: dict[str, Any], identity: Identity, what: str, num_processes: int = 1
) -> dict[str, Any]:
    """Runs the worker under a lease of one device per process."""
    progress = ProgressLog(context.log, what, every_s=0.0)

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            progress(event)
        elif "message" in event:
            context.log(f"{what}: {event['message']}")

    timeout = context.spec.resources.lease_timeout_s
    holder, model = f"{what} of {context.spec.name}", context.verifier.content_id
    launcher = (TORCHRUN, str(num_processes)) if num_processes > 1 else ()
    with context.engines.lease(num_processes, holder, timeout, context.log, model) as lease:
        where = f"{context.spec.name}: {what}"
        folder = context.scratch(identity)
        return run_worker(WORKER, job, folder, on_event, TrainingError, where, lease.environment(), launcher)
