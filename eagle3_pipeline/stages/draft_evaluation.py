"""The `draft_evaluation` asset: serves verifier and draft in vLLM and compares with the baseline."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EvaluationError
from eagle3_pipeline.evaluation.acceptance import Acceptance, first_difference, from_counters, pool
from eagle3_pipeline.evaluation.report import POOLED, data_scale_notes, markdown_report
from eagle3_pipeline.stages import baseline as baseline_stage
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.draft_checkpoint import run_training_worker, worker_job
from eagle3_pipeline.stages.engines import timed_engine
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.speeds import (
    Prompts,
    Timed,
    compare_batch_speeds,
    measure_batch_speeds,
    time_answers,
    warm_up,
)
from eagle3_pipeline.store.fingerprint import rows_content_id
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter

EVALUATION = "evaluation.parquet"
REPORT = "report.md"
CONTENT_COLUMNS = ("category", "num_drafts", "accepted_per_position", "num_differences")
EVALUATION_SCHEMA = pa.schema(
    [
        ("category", pa.string()),
        ("num_prompts", pa.int32()),
        ("num_new_tokens", pa.int64()),
        ("num_drafts", pa.int64()),
        ("accepted_per_position", pa.list_(pa.int64())),
        ("acceptance_rates", pa.list_(pa.float64())),
        ("conditional_rates", pa.list_(pa.float64())),
        ("acceptance_length", pa.float64()),
        ("tokens_per_s", pa.float64()),
        ("baseline_tokens_per_s", pa.float64()),
        ("speed_up", pa.float64()),
        ("num_differences", pa.int32()),
        ("num_near_ties", pa.int32()),
    ]
)


@dataclass(frozen=True)
class Served:
    """One category, served with the draft."""

    category: str
    acceptance: Acceptance
    timed: Timed


def materialise_evaluation(context: StageContext) -> StageResult:
    """Measures the current draft.

    Raises:
        EvaluationError: outputs with the draft differ from those without by more than near-ties.
        EngineError: vLLM does not load or serve the draft.
    """
    checkpoint = context.upstream(ids.DRAFT_CHECKPOINT)
    baseline = context.upstream(ids.BASELINE)
    identity = ids.evaluation_identity(context.spec, checkpoint.manifest.content_id, baseline.manifest.content_id)
    return context.materialise(identity, None, lambda writer: _produce(context, identity, checkpoint, baseline, writer))


def _produce(
    context: StageContext, identity: Identity, checkpoint: Artifact, baseline: Artifact, writer: ArtifactWriter
) -> Produced:
    simulated, untrained = _simulate(context, identity, checkpoint, baseline)
    sequences = pq.read_table(baseline.path(baseline_stage.SEQUENCES)).to_pylist()
    # What is compared was asked with the very same ids, whatever a template would render today.
    served, started = _serve(context, identity, checkpoint, writer.folder, baseline_stage.asked(sequences))
    expected = {row["sequence_id"]: row for row in sequences}
    speeds = {r["category"]: r for r in pq.read_table(baseline.path(baseline_stage.SPEEDS)).to_pylist()}
    notes: list[str] = []
    engine = _engine(context, checkpoint)
    rows = []
    for part in served:
        differences, ties = _compare(context, engine, identity, part, expected, notes)
        rows.append(_row(part, speeds[part.category], differences, ties))
    rows.append(_pooled_row(rows, served, list(speeds.values())))
    metrics = _metrics(rows[-1], simulated, untrained) | {"num_engine_starts": float(started)}
    by_batch = compare_batch_speeds(writer.folder, baseline)
    for row in by_batch:
        metrics |= {f"{name}_batch_{row['batch_size']:.0f}": row[name] for name in ("tokens_per_s", "speed_up")}
    notes += data_scale_notes(checkpoint.manifest.metrics)
    pq.write_table(pa.Table.from_pylist(rows, EVALUATION_SCHEMA), writer.folder / EVALUATION)
    (writer.folder / REPORT).write_text(markdown_report(context.spec.name, rows, metrics, by_batch, notes))
    return Produced(rows_content_id(CONTENT_COLUMNS, rows), metrics)


def _simulate(
    context: StageContext, identity: Identity, checkpoint: Artifact, baseline: Artifact
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Teacher-forces the trained and the untrained draft on the sequences that will be served."""
    path = str(baseline.path(baseline_stage.SEQUENCES))
    chunks = [{"chunk": ids.BASELINE, "sequences": path, "hidden_states": str(baseline.folder)}]
    job = worker_job(context, context.upstream(ids.VOCAB_MAP), chunks)
    steps = context.spec.evaluation.num_speculative_tokens
    job |= {"job": "simulate", "checkpoints": [str(checkpoint.folder), None], "num_steps": steps}
    result = run_training_worker(context, job, identity, "simulating")
    trained, untrained = result["simulations"]
    return trained, untrained


def _engine(context: StageContext, checkpoint: Artifact) -> EngineSpec:
    tokens = context.spec.evaluation.num_speculative_tokens
    return context.timed_engine_spec(draft_path=str(checkpoint.folder), num_speculative_tokens=tokens)


def _serve(
    context: StageContext, identity: Identity, checkpoint: Artifact, folder_of_speeds: Path, prompts: Prompts
) -> tuple[list[Served], bool]:
    engine, spec = _engine(context, checkpoint), context.spec.evaluation
    served = []
    with timed_engine(context, engine) as client:
        warm_up(context, engine, identity, prompts)
        for category, rows in prompts.items():
            before = client.request("counters")
            timed = time_answers(context, engine, identity, f"serving {category}", rows, spec.batch_size)
            acceptance = from_counters(before, client.request("counters"), spec.num_speculative_tokens)
            if not acceptance.num_drafts:
                raise EvaluationError(f"{context.spec.name}: vLLM drafted nothing for category {category}")
            served.append(Served(category, acceptance, timed))
        measure_batch_speeds(context, engine, identity, prompts, folder_of_speeds)
    return served, client.started


def _compare(
    context: StageContext,
    engine: EngineSpec,
    identity: Identity,
    part: Served,
    expected: dict[str, dict[str, Any]],
    notes: list[str],
) -> tuple[int, int]:
    """Counts answers that differ from the undrafted ones; each must be a near-tie."""
    differences = ties = 0
    for sequence_id, found in part.timed.answers.items():
        row = expected[sequence_id]
        prompt = row["input_ids"][: row["num_prompt_tokens"]]
        answer = row["input_ids"][row["num_prompt_tokens"] :]
        position = first_difference(answer, found)
        if position is None:
            continue
        differences += 1
        gap = _gap_at(context, engine, identity, prompt + answer[:position])
        note = (
            f"{part.category}, prompt {sequence_id}: with the draft the answer differs at token {position} "
            f"(top-2 log-probability gap {gap:.4f})"
        )
        context.log(note)
        notes.append(note)
        ties += gap <= context.spec.evaluation.near_tie_epsilon
    exact = context.spec.verifier.dtype == "float32"
    if exact and differences > ties:
        raise EvaluationError(
            f"{context.spec.name}: {differences - ties} answers of category {part.category} differ from the "
            f"undrafted ones and are no near-ties (evaluation.near_tie_epsilon); last: {notes[-1]}"
        )
    return differences, ties


def _gap_at(context: StageContext, engine: EngineSpec, identity: Identity, prefix: list[int]) -> float:
    folder = context.scratch(identity) / "gaps"
    shutil.rmtree(folder, ignore_errors=True)
    sampling = {"temperature": 0.0, "max_tokens": 1, "logprobs": 2}
    batch = PromptBatch("measuring a gap", folder, [{"sequence_id": "gap", "input_ids": prefix}], sampling)
    answers, _ = run_prompts(context, engine, batch)
    return answers["gap"]["top_gaps"][0]


def _row(part: Served, speed: dict[str, Any], differences: int, ties: int) -> dict[str, Any]:
    return {
        "category": part.category,
        "num_prompts": len(part.timed.answers),
        "num_new_tokens": part.timed.num_new_tokens,
        "num_differences": differences,
        "num_near_ties": ties,
        **_rates(part.acceptance),
        **_speeds(part.timed.tokens_per_s, speed["num_new_tokens"] / speed["elapsed_s"]),
    }


def _pooled_row(rows: list[dict[str, Any]], served: list[Served], speeds: list[dict[str, Any]]) -> dict[str, Any]:
    tokens_per_s = sum(p.timed.num_new_tokens for p in served) / sum(p.timed.elapsed_s for p in served)
    baseline = sum(s["num_new_tokens"] for s in speeds) / sum(s["elapsed_s"] for s in speeds)
    summed = ("num_prompts", "num_new_tokens", "num_differences", "num_near_ties")
    return {
        "category": POOLED,
        **{key: sum(row[key] for row in rows) for key in summed},
        **_rates(pool(part.acceptance for part in served)),
        **_speeds(tokens_per_s, baseline),
    }


def _rates(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "num_drafts": acceptance.num_drafts,
        "accepted_per_position": list(acceptance.accepted_per_position),
        "acceptance_rates": acceptance.rates(),
        "conditional_rates": acceptance.conditional_rates(),
        "acceptance_length": acceptance.acceptance_length,
    }


def _speeds(tokens_per_s: float, baseline: float) -> dict[str, float]:
    return {"tokens_per_s": tokens_per_s, "baseline_tokens_per_s": baseline, "speed_up": tokens_per_s / baseline}


def _metrics(pooled: dict[str, Any], simulated: dict[str, Any], untrained: dict[str, Any]) -> dict[str, float]:
    names = ("num_prompts", "num_drafts", "acceptance_length", "tokens_per_s", "baseline_tokens_per_s", "speed_up")
    metrics = {name: float(pooled[name]) for name in (*names, "num_differences", "num_near_ties")}
    metrics |= {f"acceptance_rate_{i}": rate for i, rate in enumerate(pooled["acceptance_rates"])}
    metrics["served_accepted_per_draft"] = pooled["acceptance_length"] - 1
    metrics["simulated_accepted_per_draft"] = simulated["served_acceptance_length"] - 1
    metrics["untrained_accepted_per_draft"] = untrained["served_acceptance_length"] - 1
    metrics["outside_draft_vocab_share"] = simulated["outside_draft_vocab_share"]
    return metrics
