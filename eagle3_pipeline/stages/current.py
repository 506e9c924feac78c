"""Which chunks the unpartitioned stages work on: those whose artifacts are of the current settings and source."""

from collections.abc import Mapping
from dataclasses import dataclass

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.errors import StaleInputError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.store.objects import Artifact


@dataclass(frozen=True)
class CurrentChunks:
    """Artifacts by chunk key, of the chunks that have both."""

    generations: Mapping[str, Artifact]
    hidden_states: Mapping[str, Artifact]


def enough_fresh(spec: PipelineSpec, num_fresh: int, num_chunks: int) -> bool:
    """Whether the unpartitioned stages may do without the others (`schedule.min_fresh_fraction`)."""
    return num_fresh > 0 and num_fresh >= spec.schedule.min_fresh_fraction * num_chunks


def current_generations(context: StageContext) -> dict[str, Artifact]:
    """The current `synthetic_generations` of the chunks that have them, by key.

    Raises:
        StaleInputError: too many chunks lack them, or there is no chunk.
    """
    return _current_generations(context)[0]


def _current_generations(context: StageContext) -> tuple[dict[str, Artifact], list[str]]:
    """What is current, and the keys of all chunks that could have it."""
    chunks = {chunk.key: chunk for chunk in context.registry.chunks_with_work()}
    datasets = {key: _dataset(context, chunk) for key, chunk in chunks.items()}
    wanted = {
        key: dataset
        for key, dataset in datasets.items()
        if not dataset or ids.has_work(context.spec, chunks[key], dataset.manifest)
    }
    found = {
        key: made
        for key, dataset in wanted.items()
        if dataset and (made := _generations(context, dataset, chunks[key]))
    }
    _require(context, ids.SYNTHETIC_GENERATIONS, found, list(wanted))
    return found, list(wanted)


def current_chunks(context: StageContext) -> CurrentChunks:
    """The current sequences and states of the chunks that have both.

    Raises:
        StaleInputError: too many chunks lack them, or there is no chunk.
    """
    generations, keys = _current_generations(context)
    states = {key: found for key, made in generations.items() if (found := _states(context, made))}
    _require(context, ids.HIDDEN_STATES, states, keys)
    return CurrentChunks({key: generations[key] for key in states}, states)


def _dataset(context: StageContext, chunk: Chunk) -> Artifact | None:
    return context.cached(ids.dataset_identity(context.spec, chunk, context.decontamination.content_id))


def _generations(context: StageContext, dataset: Artifact, chunk: Chunk) -> Artifact | None:
    return context.cached(ids.generations_identity(context.spec, context.verifier, dataset.manifest.content_id, chunk))


def _states(context: StageContext, generations: Artifact) -> Artifact | None:
    content = generations.manifest.content_ids["input_ids"]
    return context.cached(ids.hidden_states_identity(context.spec, context.verifier, content))


def _require(context: StageContext, stage: str, found: Mapping[str, Artifact], keys: list[str]) -> None:
    if not keys:
        context.all_chunks()
        raise StaleInputError(f"{context.spec.name}: no chunk has a usable row")
    missing = [key for key in keys if key not in found]
    where = f"{context.spec.name}: {stage} of {len(missing)} of {len(keys)} chunks"
    if not enough_fresh(context.spec, len(found), len(keys)):
        raise StaleInputError(
            f"{where} is not materialised for the current settings and source, first: {missing[0]}; materialise them "
            f"first, or lower schedule.min_fresh_fraction ({context.spec.schedule.min_fresh_fraction:g})"
        )
    if missing:
        context.log(f"{where} is left out (schedule.min_fresh_fraction): {', '.join(missing[:10])}")
