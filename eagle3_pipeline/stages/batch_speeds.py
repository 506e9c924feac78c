"""Speed at other batch sizes than the one that acceptance is counted at: drafts pay most when few prompts decode."""

import shutil
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.store.objects import Artifact

BATCH_SPEEDS = "batch_speeds.parquet"
_SCHEMA = pa.schema([("batch_size", pa.int32()), ("num_new_tokens", pa.int64()), ("elapsed_s", pa.float64())])
_FEWEST_PROMPTS = 8


def measure_batch_speeds(
    context: StageContext,
    engine: EngineSpec,
    identity: Identity,
    by_category: dict[str, list[dict[str, Any]]],
    sampling: dict[str, Any],
    folder: Path,
) -> None:
    """Answers some prompts at each of `evaluation.other_batch_sizes`; writes `batch_speeds.parquet`.

    Args:
        context: the pipeline.
        engine: with or without a draft.
        identity: names the scratch folder.
        by_category: evaluation prompts: rows of sequence_id, input_ids.
        sampling: greedy.
        folder: where the table goes.
    """
    rows = []
    for size in context.spec.evaluation.other_batch_sizes:
        scratch = context.scratch(identity) / f"batch-{size}"
        shutil.rmtree(scratch, ignore_errors=True)
        prompts = _some(by_category, max(_FEWEST_PROMPTS, 2 * size))
        batch = PromptBatch(f"speed at batch {size}", scratch, prompts, sampling, batch_size=size)
        answers, speed = run_prompts(context, engine, batch)
        num_new = sum(len(answer["token_ids"]) for answer in answers.values())
        rows.append({"batch_size": size, "num_new_tokens": num_new, "elapsed_s": num_new / speed["new_tokens_per_s"]})
    pq.write_table(pa.Table.from_pylist(rows, _SCHEMA), folder / BATCH_SPEEDS)


def compare_batch_speeds(drafted: Path, baseline: Artifact) -> list[dict[str, float]]:
    """batch_size, tokens_per_s, baseline_tokens_per_s, speed_up of each further batch size."""
    before = {row["batch_size"]: _speed(row) for row in pq.read_table(baseline.path(BATCH_SPEEDS)).to_pylist()}
    return [
        {
            "batch_size": row["batch_size"],
            "tokens_per_s": _speed(row),
            "baseline_tokens_per_s": before[row["batch_size"]],
            "speed_up": _speed(row) / before[row["batch_size"]],
        }
        for row in pq.read_table(drafted / BATCH_SPEEDS).to_pylist()
    ]


def _speed(row: dict[str, Any]) -> float:
    return row["num_new_tokens"] / row["elapsed_s"]


def _some(by_category: dict[str, list[dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """The first prompts of every category, one of each in turn."""
    turns = chain.from_iterable(zip_longest(*by_category.values()))
    return list(islice((row for row in turns if row is not None), count))
