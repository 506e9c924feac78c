"""Reads what artifacts hold, beyond checksums: an artifact can be whole and yet not be what its manifest says."""

from collections.abc import Iterator

import pyarrow.parquet as pq

from eagle3_pipeline.data.sequences import CONTENT_COLUMNS as SEQUENCE_COLUMNS
from eagle3_pipeline.errors import Eagle3Error
from eagle3_pipeline.stages import dataset
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.capture import captured_tokens
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.fidelity import check_states
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES
from eagle3_pipeline.store.fingerprint import table_content_id
from eagle3_pipeline.store.objects import Artifact
from eagle3_pipeline.store.shards import read_index


def deep_verify(context: StageContext) -> list[str]:
    """What is wrong with the contents of the chunks' artifacts that the pipeline refers to.

    Conversations and sequences must have the content id of their manifest; every sequence must have states of its own
    tokens, finite and varying. Artifacts that are not there are not told of.
    """
    problems = []
    for chunk in context.registry.chunks():
        for stage, check in (
            (ids.DATASET, _dataset),
            (ids.SYNTHETIC_GENERATIONS, _sequences),
            (ids.HIDDEN_STATES, _states),
        ):
            try:
                problems += [f"{stage}[{chunk.key}]: {problem}" for problem in check(context, chunk.key)]
            except Eagle3Error as error:
                problems.append(f"{stage}[{chunk.key}]: {error}")
    return problems


def _artifact(context: StageContext, stage: str, chunk: str) -> Artifact | None:
    reference = context.references.get(stage, chunk)
    return context.store.get(stage, reference.fingerprint) if reference else None


def _content(artifact: Artifact, name: str, columns: tuple[str, ...]) -> Iterator[str]:
    found = table_content_id(pq.read_table(artifact.path(name)), columns)
    if found != artifact.manifest.content_id:
        yield f"{name} holds rows of content id {found}, the manifest says {artifact.manifest.content_id}"


def _dataset(context: StageContext, chunk: str) -> Iterator[str]:
    if artifact := _artifact(context, ids.DATASET, chunk):
        yield from _content(artifact, dataset.CONVERSATIONS, dataset.CONTENT_COLUMNS)


def _sequences(context: StageContext, chunk: str) -> Iterator[str]:
    if artifact := _artifact(context, ids.SYNTHETIC_GENERATIONS, chunk):
        yield from _content(artifact, SEQUENCES, SEQUENCE_COLUMNS)


def _states(context: StageContext, chunk: str) -> Iterator[str]:
    states, sequences = (_artifact(context, s, chunk) for s in (ids.HIDDEN_STATES, ids.SYNTHETIC_GENERATIONS))
    if states is None or sequences is None:
        return
    if states.manifest.inputs["input_ids"] != sequences.manifest.content_ids["input_ids"]:
        yield "the states are of other sequences than the pipeline's current ones; materialise hidden_states"
        return
    rows = pq.read_table(sequences.path(SEQUENCES), columns=["sequence_id", "input_ids"]).to_pylist()
    geometry = context.verifier.geometry(context.spec.capture)
    variance = context.spec.capture.min_layer_variance
    check_states(states.folder, read_index(states.folder), captured_tokens(rows), geometry, variance, chunk)
