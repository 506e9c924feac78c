"""Sends prompts to an engine: the request of a chunk, its answers and speed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.engine.jobs import GenerateJob, read_journal
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineDiedError, EngineError
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.engines import open_engine
from eagle3_pipeline.stages.progress import ProgressLog
from eagle3_pipeline.store.fingerprint import ids_checksum

JOURNAL = "journal.jsonl"
_PROMPTS = "prompts.parquet"
_PROMPT_SCHEMA = pa.schema([("sequence_id", pa.string()), ("input_ids", pa.list_(pa.int32()))])


@dataclass(frozen=True)
class PromptBatch:
    """One request of an engine.

    Attributes:
        what: names the work in the log.
        folder: scratch folder of prompts and journal; a rerun continues from what it holds.
        rows: sequence_id and input_ids of each prompt.
        sampling: temperature, top_p, top_k, max_tokens, stop_token_ids, logprobs.
        capture_folder: where states go; `None`: no capture.
        include_output: capture sampled tokens too.
        batch_size: most requests in flight; 0: as many as the engine takes.
        urgent: served before the requests of other chunks.
    """

    what: str
    folder: Path
    rows: list[dict[str, Any]]
    sampling: dict[str, Any]
    capture_folder: Path | None = None
    include_output: bool = False
    batch_size: int = 0
    urgent: bool = False


def run_prompts(
    context: StageContext, engine: EngineSpec, batch: PromptBatch
) -> tuple[dict[str, dict[str, Any]], dict[str, float]]:
    """Answers a batch.

    Returns:
        The answers by sequence id (as `engine.jobs` journals them), and engine_s, tokens_per_s (prompt and new
        tokens), new_tokens_per_s, num_reused_rows, num_engine_starts, engine_wait_s.

    Raises:
        EngineError, CaptureError, DiskSpaceError: as the engine met them.
    """
    batch.folder.mkdir(parents=True, exist_ok=True)
    prompts, journal = batch.folder / _PROMPTS, batch.folder / JOURNAL
    pq.write_table(pa.Table.from_pylist(batch.rows, _PROMPT_SCHEMA), prompts)
    job = GenerateJob(
        str(prompts),
        str(journal),
        batch.sampling,
        str(batch.capture_folder or ""),
        batch.include_output,
        batch.batch_size,
        batch.urgent,
    )
    with open_engine(context, engine) as client:
        try:
            counts = client.generate(job, ProgressLog(context.log, batch.what))
        except EngineDiedError as error:
            context.engines.died(client, error)
            raise
        context.engines.worked(client)
    elapsed = max(counts["elapsed_s"], 1e-9)
    speed = {
        "engine_s": elapsed,
        "tokens_per_s": (counts["prompt_tokens"] + counts["new_tokens"]) / elapsed,
        "new_tokens_per_s": counts["new_tokens"] / elapsed,
        "num_reused_rows": counts["reused"],
        "num_engine_starts": float(client.started),
        "engine_wait_s": client.waited_s,
    }
    answers = read_journal(journal)
    others = [row["sequence_id"] for row in batch.rows if not _answers(answers.get(row["sequence_id"]), row)]
    if others:
        raise EngineError(
            f"{batch.what}: {len(others)} of {len(batch.rows)} prompts have no answer of their own in {journal}, "
            f"first: {others[0]}"
        )
    return answers, speed


def _answers(answer: dict[str, Any] | None, row: dict[str, Any]) -> bool:
    """Whether this is the answer to this very prompt, not to another one of the same name."""
    return answer is not None and answer.get("prompt") == ids_checksum(row["input_ids"])
