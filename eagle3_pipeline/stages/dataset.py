"""The `dataset` asset: a chunk's rows as normalised conversations, and the rejected rows with a reason each."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.data.conversations import (
    CONTENT_COLUMNS,
    REJECTED_SCHEMA,
    Message,
    conversation_id,
    conversation_schema,
    normalise,
)
from eagle3_pipeline.data.decontamination import OVERLAPS, Overlap, instructions
from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.data.rejection import Rejection, describe
from eagle3_pipeline.data.row_formats import unread_keys
from eagle3_pipeline.data.sources import RawRow, read_rows
from eagle3_pipeline.errors import DataError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.store.fingerprint import rows_content_id
from eagle3_pipeline.store.objects import ArtifactWriter

CONVERSATIONS = "conversations.parquet"
REJECTED = "rejected.parquet"
_MOST_KEYS = 20
_FORMAT = "Repair or remove the rows, set dataset.format and dataset.columns to what they are"
# The setting that decides, by the reason of a rejection.
_ADVICE = {
    OVERLAPS: "If these words are an instruction that all prompts share, set dataset.decontaminate: false; else take "
    "the prompts out of evaluation.prompts or the rows out of the source",
    "tool_turn": "Set dataset.tool_turns: text to keep calls as text",
    "row_too_long": "Raise dataset.max_row_bytes",
    "wrong_shape": _FORMAT,
    "bad_role": _FORMAT,
    "too_short": "Lower dataset.filters.min_chars",
    "too_long": "Raise dataset.filters.max_chars or max_turns",
    "filtered_source": "Change dataset.filters.sources, exclude_sources or dataset.columns.source",
    "filtered_language": "Change dataset.filters.languages or dataset.columns.language",
}


def materialise_dataset(context: StageContext, chunk_key: str) -> StageResult:
    """Normalises one chunk.

    Raises:
        DataError: the file changed since the last sync, is unreadable, or too few of its rows are usable.
        StaleInputError: settings of `dataset` changed since the last sync.
    """
    context.registry.require_synced(context.spec)
    chunk = context.registry.chunk(chunk_key)
    identity = ids.dataset_identity(context.spec, chunk, context.decontamination.content_id)
    return context.materialise(identity, chunk_key, lambda writer: _produce(context, chunk, identity, writer))


def _produce(context: StageContext, chunk: Chunk, identity: Identity, writer: ArtifactWriter) -> Produced:
    rows, rejected, unread = _normalise_rows(context, chunk)
    num_read = len(rows) + len(rejected)
    spec = context.spec.dataset
    where = f"{context.spec.name}: chunk {chunk.key} ({chunk.file} from row {chunk.row_start})"
    reasons = Counter(row["reason"] for row in rejected)
    if not num_read:
        raise DataError(f"{where} is empty: its rows are gone from the source")
    # Duplicates are no fault of the chunk.
    num_own = num_read - reasons["duplicate"]
    if not num_own:
        raise DataError(f"{where}: all of its {num_read} rows are duplicates of earlier ones; there is nothing to do")
    rejections = pa.Table.from_pylist(rejected, REJECTED_SCHEMA)
    if len(rows) < spec.min_yield * num_own:
        first = next(row["detail"] for row in rejected if row["reason"] != "duplicate")
        raise DataError(
            f"{where}: {len(rows)} of {num_own} rows are usable, dataset.min_yield asks for {spec.min_yield:.0%}; "
            f"rejected: {describe(reasons)}; first: {first}; all of them: {context.keep_rejected(identity, rejections)}"
            f". {_advice(reasons)}, lower dataset.min_yield, or lower schedule.min_fresh_fraction to do without this "
            "chunk"
        )
    context.log(f"{where}: {len(rows):,} of {num_read:,} rows are usable; rejected: {describe(reasons)}")
    if unread:
        told = ", ".join(f"{key} ({count:,})" for key, count in unread.most_common(_MOST_KEYS))
        context.log(f"{where}: keys of turns that nothing reads, and in how many turns: {told}")
    has_reasoning = any("reasoning" in message for row in rows for message in row["messages"])
    if has_reasoning:
        # As they are read again.
        rows = [row | {"messages": [{"reasoning": None, **message} for message in row["messages"]]} for row in rows]
    table = pa.Table.from_pylist(rows, conversation_schema(has_reasoning))
    pq.write_table(table, writer.folder / CONVERSATIONS)
    pq.write_table(rejections, writer.folder / REJECTED)
    turns = sum(len(row["messages"]) for row in rows)
    metrics = {"num_read": num_read, "num_samples": len(rows), "num_rejected": len(rejected), "num_turns": turns}
    metrics |= {f"unread_key_{key}": count for key, count in unread.most_common(_MOST_KEYS)}
    return Produced(rows_content_id(CONTENT_COLUMNS, rows), metrics, dict(reasons))


def _advice(reasons: Counter[str]) -> str:
    """What may be done about the most frequent reason."""
    own = Counter({reason: count for reason, count in reasons.items() if reason != "duplicate"})
    (reason, _), *_ = own.most_common(1)
    return _ADVICE.get(reason, "Repair or remove the rows")


def _normalise_rows(
    context: StageContext, chunk: Chunk
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], Counter[str]]:
    """Usable rows, rejected ones, and keys of usable rows' turns that nothing reads."""
    duplicates = set(chunk.duplicate_rows)
    spec = context.spec.dataset
    found = read_rows(spec, chunk.file, chunk.row_start, chunk.byte_start, chunk.num_rows)
    checked: list[bytes] = []
    rows: list[tuple[int, str, list[Message] | Rejection, list[Overlap]]] = []
    unread: dict[int, Counter[str]] = {}
    for row in found:
        checked.append(row.digest)
        outcome = _outcome(context, row, row.number in duplicates)
        overlaps: list[Overlap] = []
        if not isinstance(outcome, Rejection):
            overlaps = context.decontamination.find(outcome)
            unread[row.number] = unread_keys(row.value or {}, spec)
        # Of a row that is used its text is not kept.
        raw = row.raw if overlaps or isinstance(outcome, Rejection) else ""
        rows.append((row.number, raw, outcome, overlaps))
    chunk.check_content(checked, spec)
    common = instructions(overlaps for _, _, outcome, overlaps in rows if not isinstance(outcome, Rejection))
    accepted: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for number, raw, outcome, overlaps in rows:
        own = next((one for one in overlaps if (one.place, one.words) not in common), None)
        problem = outcome if isinstance(outcome, Rejection) else own.rejection if own else None
        if problem:
            rejected.append({"row_number": number, "reason": problem.reason, "detail": problem.detail, "raw": raw})
        elif not isinstance(outcome, Rejection):
            row_id = conversation_id(outcome)
            accepted.append({"conversation_id": row_id, "row_number": number, "messages": outcome})
            dropped += unread[number]
    return accepted, rejected, dropped


def _outcome(context: StageContext, row: RawRow, is_duplicate: bool) -> list[Message] | Rejection:
    if is_duplicate:
        return Rejection("duplicate", "an earlier row of the source has the same content")
    if row.value is None:
        return Rejection(row.reason, _unread(row, context.spec.dataset.max_row_bytes))
    return normalise(row.value, context.spec.dataset)


def _unread(row: RawRow, max_row_bytes: int) -> str:
    """Why a row has no value."""
    details = {
        "empty": "the line is blank",
        "bad_json": "the line is no JSON in UTF-8",
        "not_an_object": "the line is JSON, but no object",
        "duplicate_key": "an object names a key twice",
        "row_too_long": f"longer than dataset.max_row_bytes ({max_row_bytes:,})",
    }
    return details.get(row.reason, row.raw[:300])
