"""The `dataset` asset: a chunk's rows as normalised conversations, and the rejected rows with a reason each."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.data.conversations import (
    CONTENT_COLUMNS,
    CONVERSATION_SCHEMA,
    REJECTED_SCHEMA,
    conversation_id,
    normalise,
)
from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.data.rejection import Rejection, describe
from eagle3_pipeline.data.sources import RawRow, read_rows
from eagle3_pipeline.errors import DataError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.store.fingerprint import rows_content_id
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline.store.objects import ArtifactWriter

CONVERSATIONS = "conversations.parquet"
REJECTED = "rejected.parquet"


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
    rows, rejected = _normalise_rows(context, chunk)
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
            ". Repair or remove the rows, lower dataset.min_yield, or lower schedule.min_fresh_fraction to do without "
            "this chunk"
        )
    context.log(f"{where}: {len(rows):,} of {num_read:,} rows are usable; rejected: {describe(reasons)}")
    pq.write_table(pa.Table.from_pylist(rows, CONVERSATION_SCHEMA), writer.folder / CONVERSATIONS)
    pq.write_table(rejections, writer.folder / REJECTED)
    turns = sum(len(row["messages"]) for row in rows)
    metrics = {"num_read": num_read, "num_samples": len(rows), "num_rejected": len(rejected), "num_turns": turns}
    return Produced(rows_content_id(CONTENT_COLUMNS, rows), metrics, dict(reasons))


def _normalise_rows(context: StageContext, chunk: Chunk) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    accepted: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    duplicates = set(chunk.duplicate_rows)
    spec = context.spec.dataset
    found = read_rows(spec, chunk.file, chunk.row_start, chunk.byte_start, chunk.num_rows)
    checked = []
    for row in found:
        checked.append(row.digest)
        outcome = _outcome(context, row, row.number in duplicates)
        if isinstance(outcome, Rejection):
            rejected.append(
                {"row_number": row.number, "reason": outcome.reason, "detail": outcome.detail, "raw": row.raw}
            )
        else:
            identity = conversation_id(outcome)
            accepted.append({"conversation_id": identity, "row_number": row.number, "messages": outcome})
    chunk.check_content(checked)
    return accepted, rejected


def is_empty(dataset: Manifest) -> bool:
    """Whether no row of the chunk is usable (and `dataset.min_yield` allows that): there is nothing to do for it."""
    return dataset.metrics["num_samples"] == 0


def _outcome(context: StageContext, row: RawRow, is_duplicate: bool) -> list[dict[str, str]] | Rejection:
    if is_duplicate:
        return Rejection("duplicate", "an earlier row of the source has the same content")
    if row.value is None:
        return Rejection(row.reason, _unread(row, context.spec.dataset.max_row_bytes))
    messages = normalise(row.value, context.spec.dataset)
    if isinstance(messages, Rejection):
        return messages
    return context.decontamination.check(messages) or messages


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
