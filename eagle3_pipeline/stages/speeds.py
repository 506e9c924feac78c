"""Speed of an engine on the evaluation prompts, with and without a draft, one way for both."""

import shutil
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.templates import chat_template
from eagle3_pipeline.store.objects import Artifact

BATCH_SPEEDS = "batch_speeds.parquet"
_SCHEMA = pa.schema([("batch_size", pa.int32()), ("num_new_tokens", pa.int64()), ("elapsed_s", pa.float64())])
_FEWEST_PROMPTS = 8
_WARM_UP_TOKENS = 8
Prompts = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Timed:
    """Prompts that an engine answered: new tokens by sequence id, and how long it took."""

    answers: dict[str, list[int]]
    elapsed_s: float

    @property
    def num_new_tokens(self) -> int:
        """Of all answers."""
        return sum(map(len, self.answers.values()))

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second."""
        return self.num_new_tokens / self.elapsed_s


def greedy_sampling(context: StageContext) -> dict[str, Any]:
    """Sampling parameters of the evaluation."""
    stop = chat_template(context).stop_token_ids
    return {"temperature": 0.0, "max_tokens": context.spec.evaluation.max_new_tokens, "stop_token_ids": stop}


def time_answers(
    context: StageContext,
    engine: EngineSpec,
    identity: Identity,
    what: str,
    rows: list[dict[str, Any]],
    batch_size: int,
    **changes: Any,
) -> Timed:
    """Answers prompts greedily, all of them anew: times of an interrupted measurement's parts cannot be joined.

    Args:
        context: the pipeline.
        engine: with or without a draft.
        identity: of the artifact that is made; names the scratch folder.
        what: is measured, for progress lines.
        rows: prompts of sequence_id, input_ids.
        batch_size: most of them decoded at once.
        changes: of the sampling parameters.
    """
    folder = context.scratch(identity) / "timed"
    shutil.rmtree(folder, ignore_errors=True)
    batch = PromptBatch(what, folder, rows, greedy_sampling(context) | changes, batch_size=batch_size)
    answers, speed = run_prompts(context, engine, batch)
    return Timed({row["sequence_id"]: answers[row["sequence_id"]]["token_ids"] for row in rows}, speed["engine_s"])


def warm_up(context: StageContext, engine: EngineSpec, identity: Identity, prompts: Prompts) -> None:
    """Short answers at every batch size that is measured: an engine compiles some kernels when they are needed."""
    evaluation = context.spec.evaluation
    tokens = min(_WARM_UP_TOKENS, evaluation.max_new_tokens)
    for size in (evaluation.batch_size, *evaluation.other_batch_sizes):
        rows = _some(prompts, 2 * size)
        time_answers(context, engine, identity, f"warming up batch {size}", rows, size, max_tokens=tokens)


def measure_batch_speeds(
    context: StageContext, engine: EngineSpec, identity: Identity, prompts: Prompts, folder: Path
) -> None:
    """Speed at other batch sizes than the one that acceptance is counted at: drafts pay most when few prompts decode.

    Answers some prompts at each of `evaluation.other_batch_sizes`; writes `batch_speeds.parquet` into `folder`.
    """
    rows = []
    for size in context.spec.evaluation.other_batch_sizes:
        some = _some(prompts, max(_FEWEST_PROMPTS, 2 * size))
        timed = time_answers(context, engine, identity, f"speed at batch {size}", some, size)
        rows.append({"batch_size": size, "num_new_tokens": timed.num_new_tokens, "elapsed_s": timed.elapsed_s})
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


def _some(prompts: Prompts, count: int) -> list[dict[str, Any]]:
    """The first prompts of every category, one of each in turn."""
    turns = chain.from_iterable(zip_longest(*prompts.values()))
    return list(islice((row for row in turns if row is not None), count))
