"""The verifier's outputs of a chunk: `synthetic_generations` and `hidden_states`, in one pass where that is right.

Missing both, the engine captures the states while it generates. Missing the states only, it prefills the stored
sequences. Missing neither, nothing is started.
"""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.data.chat_template import ChatTemplate
from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.data.rejection import describe
from eagle3_pipeline.data.sequences import (
    CONTENT_COLUMNS,
    DUPLICATE,
    REJECTED_SCHEMA,
    SEQUENCE_SCHEMA,
    TOKEN_COUNT_SCHEMA,
    Prompt,
    RejectedTurn,
    Sequence,
    count_supervised,
    distinct_prompts,
    make_prompts,
    passthrough_sequences,
    root_of,
    sequence_from_answer,
)
from eagle3_pipeline.errors import DataError, DecodingError
from eagle3_pipeline.stages import dataset as dataset_stage
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.capture import (
    captured_tokens,
    check_answers,
    check_recaptured,
    complete_records,
    prefill,
    seal_capture,
)
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.engines import Passes, choose_passes
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.templates import chat_template
from eagle3_pipeline.store.fingerprint import digest, rows_content_id, token_lists_id
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter
from eagle3_pipeline.store.records import written_records
from eagle3_pipeline.store.shards import recorded_checksums

SEQUENCES = "sequences.parquet"
TOKEN_COUNTS = "token_counts.parquet"
REJECTED = "rejected.parquet"
_CAPTURE = "capture"


@dataclass(frozen=True)
class ChunkOutputs:
    """Results of one chunk; `None` for what was not asked for."""

    generations: StageResult | None
    hidden_states: StageResult | None


def materialise_outputs(
    context: StageContext, chunk: str, generations: bool = True, hidden_states: bool = True
) -> ChunkOutputs:
    """Materialises what is asked for of one chunk.

    Args:
        context: the pipeline.
        chunk: the chunk's key.
        generations: whether `synthetic_generations` is wanted.
        hidden_states: whether `hidden_states` is wanted.

    Raises:
        DataError: too few turns give a sequence.
        EngineError, CaptureError, DiskSpaceError: as the engine met them.
    """
    made = states = None
    captured: Path | None = None
    dataset = context.last_manifest(ids.DATASET, chunk)
    registered = next((one for one in context.registry.chunks() if one.key == chunk), None)
    if dataset and registered and not ids.has_work(context.spec, registered, dataset):
        context.log(f"chunk {chunk} has no usable row of its own: there is nothing to generate or to capture")
        return ChunkOutputs(None, None)
    if generations:
        upstream = context.upstream(ids.DATASET, chunk)
        identity = ids.generations_identity(context.spec, context.verifier, upstream.manifest.content_id, registered)
        captured = context.scratch(identity) / _CAPTURE if hidden_states and one_pass(context) else None
        made = context.materialise(
            identity, chunk, lambda writer: _generate(context, chunk, upstream, identity, writer, captured, registered)
        )
    if hidden_states:
        sequences = made.artifact if made else context.upstream(ids.SYNTHETIC_GENERATIONS, chunk)
        states = _materialise_states(context, chunk, sequences, captured, bool(made and made.recomputed))
    return ChunkOutputs(made, states)


def one_pass(context: StageContext) -> bool:
    """Whether to try to capture while generating; the engine's smoke test has a say too."""
    generation = context.spec.generation
    return generation.mode == "regenerate" and generation.one_pass != "never"


def _generate(
    context: StageContext,
    chunk: str,
    dataset: Artifact,
    identity: Identity,
    writer: ArtifactWriter,
    captured: Path | None,
    registered: Chunk | None,
) -> Produced:
    spec = context.spec.generation
    if spec.mode == "regenerate":
        context.engines.require_startable(context.capturing_engine_spec() if captured else context.engine_spec())
    template = chat_template(context)
    conversations = pq.read_table(dataset.path(dataset_stage.CONVERSATIONS)).to_pylist()
    if spec.mode == "passthrough":
        items = [
            item
            for row in conversations
            for item in passthrough_sequences(row["conversation_id"], row["messages"], template, spec)
        ]
        sequences, rejected = _split(items), [i for i in items if isinstance(i, RejectedTurn)]
        speed: dict[str, float] = {}
    else:
        repeated = set(registered.duplicate_turns or ()) if registered else set()
        before = {(row["conversation_id"], turn) for row in conversations for turn in _repeated(row, repeated)}
        sequences, rejected, speed = _regenerate(context, chunk, conversations, template, identity, captured, before)
    roots = {row["conversation_id"]: root_of(row["messages"], template) for row in conversations}
    return _write_sequences(context, chunk, identity, writer, sequences, rejected, speed, roots)


def _repeated(row: dict[str, Any], repeated: set[tuple[int, int]]) -> list[int]:
    """Turns of a row that an earlier chunk asks for."""
    return [turn for turn in range(len(row["messages"])) if (row["row_number"], turn) in repeated]


def _split(items: list[Any]) -> list[Sequence]:
    return [item for item in items if isinstance(item, Sequence)]


def _regenerate(
    context: StageContext,
    chunk: str,
    conversations: list[dict[str, Any]],
    template: ChatTemplate,
    identity: Identity,
    captured: Path | None,
    asked_before: set[tuple[str, int]],
) -> tuple[list[Sequence], list[RejectedTurn], dict[str, float]]:
    spec = context.spec.generation
    made = [
        item for row in conversations for item in make_prompts(row["conversation_id"], row["messages"], template, spec)
    ]
    items = distinct_prompts(made, asked_before)
    if not any(isinstance(item, Prompt) for item in items):
        # Those of its own were rejected as evaluation prompts, say; a chunk of nothing but repeats is none.
        items = distinct_prompts(made)
    prompts = [item for item in items if isinstance(item, Prompt)]
    rejected = [item for item in items if isinstance(item, RejectedTurn)]
    folder = context.scratch(identity)
    passes = choose_passes(context, spec.temperature > 0) if captured else Passes(False)
    captured = captured if passes.together else None
    if captured:
        context.require_capture_space(captured, sum(len(p.input_ids) + spec.max_new_tokens for p in prompts))
    sampling = {
        "temperature": spec.temperature,
        "top_p": spec.top_p,
        "top_k": spec.top_k,
        "max_tokens": spec.max_new_tokens,
        "stop_token_ids": template.stop_token_ids,
    }
    engine = context.capturing_engine_spec() if captured else context.engine_spec()
    rows = [{"sequence_id": p.sequence_id, "input_ids": p.input_ids} for p in prompts]
    batch = PromptBatch(f"generating chunk {chunk}", folder, rows, sampling, captured, include_output=True)
    answers, speed = run_prompts(context, engine, batch)
    speed = passes.add_to(speed)
    outcomes = [sequence_from_answer(p, answers[p.sequence_id], template, spec) for p in prompts]
    rejected += [outcome for outcome in outcomes if isinstance(outcome, RejectedTurn)]
    return _split(outcomes), rejected, speed


def _write_sequences(
    context: StageContext,
    chunk: str,
    identity: Identity,
    writer: ArtifactWriter,
    sequences: list[Sequence],
    rejected: list[RejectedTurn],
    speed: dict[str, float],
    roots: dict[str, str | None] | None = None,
) -> Produced:
    reasons = Counter(turn.rejection.reason for turn in rejected)
    # Duplicates are no fault of the chunk.
    num_turns = len(sequences) + len(rejected) - reasons[DUPLICATE]
    where = f"{context.spec.name}: chunk {chunk}"
    needed = max(1, context.spec.generation.min_yield * num_turns)
    rejections = pa.Table.from_pylist([r.row() for r in rejected], REJECTED_SCHEMA)
    if len(sequences) < needed:
        raise DataError(
            f"{where}: {len(sequences)} of {num_turns} turns give a training sequence, generation.min_yield asks for "
            f"{context.spec.generation.min_yield:.0%}, at least one; rejected: {describe(reasons)}; first: "
            f"{next((r.rejection.detail for r in rejected if r.rejection.reason != DUPLICATE), 'none')}; all of them: "
            f"{context.keep_rejected(identity, rejections)}"
        )
    context.log(
        f"{where}: {len(sequences):,} of {num_turns:,} turns give a training sequence; rejected: {describe(reasons)}"
    )
    rows = [{**vars(sequence), "root": (roots or {}).get(sequence.conversation_id)} for sequence in sequences]
    counts = sorted(count_supervised(sequences).items())
    pq.write_table(pa.Table.from_pylist(rows, SEQUENCE_SCHEMA), writer.folder / SEQUENCES)
    pq.write_table(rejections, writer.folder / REJECTED)
    table = pa.Table.from_pylist([{"token_id": t, "count": c} for t, c in counts], TOKEN_COUNT_SCHEMA)
    pq.write_table(table, writer.folder / TOKEN_COUNTS)
    supervised = sum(count for _, count in counts)
    metrics = {
        "num_sequences": len(sequences),
        "num_rejected": len(rejected),
        "num_tokens": sum(len(s.input_ids) for s in sequences),
        "num_supervised_tokens": supervised,
        "num_truncated": sum(s.finish_reason == "length" for s in sequences),
        **speed,
    }
    ordered = [[s.sequence_id, token_lists_id([s.input_ids])] for s in sequences]
    content_ids = {"input_ids": digest(ordered), "token_counts": digest(counts)}
    return Produced(rows_content_id(CONTENT_COLUMNS, rows), metrics, dict(reasons), content_ids)


def _materialise_states(
    context: StageContext, chunk: str, sequences: Artifact, captured: Path | None, just_now: bool
) -> StageResult:
    """`captured`: what the generating pass left, `just_now` if this process was there."""
    content = sequences.manifest.content_ids["input_ids"]
    identity = ids.hidden_states_identity(context.spec, context.verifier, content)
    try:
        result = context.materialise(
            identity, chunk, lambda writer: _capture(context, chunk, sequences, identity, writer, captured, just_now)
        )
    except DecodingError as error:
        _take_back(context, chunk, sequences, captured, error)
        raise
    if captured:
        # Prompts, journal and any left-over shards of the pass whose results are published now.
        shutil.rmtree(captured.parent, ignore_errors=True)
    return result


def _take_back(
    context: StageContext, chunk: str, sequences: Artifact, captured: Path | None, error: DecodingError
) -> None:
    """Answers that were decoded wrongly are not kept, nor made again by the same engine in the same way."""
    context.store.quarantine(sequences.folder, str(error))
    context.log(f"chunk {chunk}: its answers were decoded wrongly and are in quarantine")
    if captured:
        context.engines.distrust(context.capturing_engine_spec(), str(error))
        shutil.rmtree(captured.parent, ignore_errors=True)


def _capture(
    context: StageContext,
    chunk: str,
    sequences: Artifact,
    identity: Identity,
    writer: ArtifactWriter,
    captured: Path | None,
    just_now: bool,
) -> Produced:
    """Takes the shards of the generating pass if they are complete, else prefills the stored sequences."""
    where = f"{context.spec.name}: chunk {chunk}"
    rows = pq.read_table(sequences.path(SEQUENCES), columns=["sequence_id", "input_ids", "loss_mask"]).to_pylist()
    tokens = captured_tokens(rows)
    records = complete_records(context, captured, tokens, just_now) if captured else None
    captured_before = records is not None
    speed: dict[str, float] = {}
    if captured and records:
        for path in captured.iterdir():
            shutil.move(path, writer.folder / path.name)
    else:
        speed = prefill(context, f"capturing chunk {chunk}", tokens, identity, writer.folder)
        records = written_records(writer.folder, context.verifier.geometry(context.spec.capture))
    statistics = seal_capture(context, where, writer.folder, tokens, records, identity.fingerprint)
    statistics |= check_recaptured(context, where, writer.folder, rows, identity, captured_before)
    statistics |= check_answers(context, where, writer.folder, rows)
    metrics = {
        "num_sequences": len(tokens),
        "num_tokens": sum(map(len, tokens.values())),
        "hidden_states_bytes": sum(path.stat().st_size for path in writer.folder.glob("shard-*.safetensors")),
        "one_pass": float(captured_before),
        **statistics,
        **speed,
    }
    return Produced(identity.fingerprint, metrics, checksums=recorded_checksums(writer.folder))
