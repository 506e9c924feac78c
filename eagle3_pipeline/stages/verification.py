"""`eagle3 verify`: checksums of what a pipeline uses, and, deep, whether it is what its manifest says."""

from collections.abc import Iterator

import pyarrow.parquet as pq

from eagle3_pipeline.data.sequences import CONTENT_COLUMNS as SEQUENCE_COLUMNS
from eagle3_pipeline.errors import CorruptArtifactError, Eagle3Error, StoreError
from eagle3_pipeline.stages import dataset
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.capture import captured_tokens
from eagle3_pipeline.stages.champion import read_champion
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.fidelity import check_states
from eagle3_pipeline.stages.published_draft import published_damage
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES
from eagle3_pipeline.store.fingerprint import table_content_id
from eagle3_pipeline.store.objects import Artifact
from eagle3_pipeline.store.shards import read_index


def verify(context: StageContext) -> tuple[int, list[str]]:
    """Compares every file that this pipeline uses with its checksum; damaged artifacts go to quarantine.

    Returns:
        How many artifacts were read, and what is wrong with the others.
    """
    sound, problems = 0, []
    for where, stage, fingerprint in _used(context):
        try:
            artifact = context.store.get(stage, fingerprint) if fingerprint else None
            if artifact:
                context.store.verify(artifact)
                sound += 1
            else:
                problems.append(f"{where}: its reference or its artifact is gone or unreadable; materialise it again")
        except CorruptArtifactError as error:
            problems.append(f"{where}: {error}")
    champion = read_champion(context.references.folder)
    if champion and (broken := published_damage(context, champion)):
        problems.append(f"published_draft: {broken}; materialise it again")
    return sound, problems


def _used(context: StageContext) -> Iterator[tuple[str, str, str]]:
    """Name, stage and fingerprint of every artifact in use, the champion's checkpoint among them."""
    checkpoints = set()
    for stage, chunk in context.references.places():
        reference = context.references.get(stage, chunk)
        fingerprint = reference.fingerprint if reference else ""
        checkpoints |= {fingerprint} if stage == ids.DRAFT_CHECKPOINT else set()
        yield f"{stage}[{chunk}]" if chunk else stage, stage, fingerprint
    champion = read_champion(context.references.folder)
    if champion and champion.draft.checkpoint not in checkpoints:
        yield "the champion", ids.DRAFT_CHECKPOINT, champion.draft.checkpoint


def deep_verify(context: StageContext) -> list[str]:
    """What is wrong with the contents of the chunks' artifacts that the pipeline refers to.

    Conversations and sequences must have the content id of their manifest; every sequence must have states of its own
    tokens, finite and varying. What is not what its manifest says goes to quarantine; artifacts that are not there are
    not told of.
    """
    problems = []
    for chunk in context.registry.chunks():
        for stage, check in (
            (ids.DATASET, _check_dataset),
            (ids.SYNTHETIC_GENERATIONS, _check_sequences),
            (ids.HIDDEN_STATES, _check_states),
        ):
            try:
                check(context, chunk.key)
            except Eagle3Error as error:
                problems.append(f"{stage}[{chunk.key}]: {error}")
    return problems


def _artifact(context: StageContext, stage: str, chunk: str) -> Artifact | None:
    reference = context.references.get(stage, chunk)
    return context.store.get(stage, reference.fingerprint) if reference else None


def _check_content(context: StageContext, artifact: Artifact, name: str, columns: tuple[str, ...]) -> None:
    found, told = table_content_id(pq.read_table(artifact.path(name)), columns), artifact.manifest.content_id
    if found != told:
        context.store.refuse(artifact, f"{name} holds rows of content id {found}, the manifest says {told}")


def _check_dataset(context: StageContext, chunk: str) -> None:
    if artifact := _artifact(context, ids.DATASET, chunk):
        _check_content(context, artifact, dataset.CONVERSATIONS, dataset.CONTENT_COLUMNS)


def _check_sequences(context: StageContext, chunk: str) -> None:
    if artifact := _artifact(context, ids.SYNTHETIC_GENERATIONS, chunk):
        _check_content(context, artifact, SEQUENCES, SEQUENCE_COLUMNS)


def _check_states(context: StageContext, chunk: str) -> None:
    states, sequences = (_artifact(context, s, chunk) for s in (ids.HIDDEN_STATES, ids.SYNTHETIC_GENERATIONS))
    if states is None or sequences is None:
        return
    if states.manifest.inputs["input_ids"] != sequences.manifest.content_ids["input_ids"]:
        raise StoreError(
            "the states are of other sequences than the pipeline's current ones; materialise hidden_states"
        )
    rows = pq.read_table(sequences.path(SEQUENCES), columns=["sequence_id", "input_ids"]).to_pylist()
    geometry = context.verifier.geometry(context.spec.capture)
    variance = context.spec.capture.min_layer_variance
    check_states(states.folder, read_index(states.folder), captured_tokens(rows), geometry, variance, chunk)
