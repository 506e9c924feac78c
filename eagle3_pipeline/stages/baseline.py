"""The `baseline` asset: the undrafted verifier's greedy answers to the evaluation prompts, its speed, its states.

Cached per verifier, so a new draft costs one load. The states let the draft be teacher-forced on the sequences that
are served: greedy decoding with a draft gives the same ones.
"""

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.data.sequences import SEQUENCE_SCHEMA
from eagle3_pipeline.evaluation.prompts import read_prompt_bytes
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.batch_speeds import measure_batch_speeds
from eagle3_pipeline.stages.capture import captured_tokens, seal_capture
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.templates import chat_template, prompt_rows
from eagle3_pipeline.store.fingerprint import rows_content_id
from eagle3_pipeline.store.objects import ArtifactWriter
from eagle3_pipeline.store.records import written_records

SEQUENCES = "sequences.parquet"
SPEEDS = "speeds.parquet"
SPEED_SCHEMA = pa.schema(
    [
        ("category", pa.string()),
        ("num_prompts", pa.int32()),
        ("num_new_tokens", pa.int64()),
        ("elapsed_s", pa.float64()),
    ]
)


def materialise_baseline(context: StageContext) -> StageResult:
    """Answers the evaluation prompts without a draft."""
    prompts = read_prompt_bytes(context.spec.evaluation.prompts)
    identity = ids.baseline_identity(context.spec, context.verifier, prompts)
    return context.materialise(identity, None, lambda writer: _produce(context, identity, writer))


def greedy_sampling(context: StageContext) -> dict[str, Any]:
    """Sampling parameters of the evaluation."""
    stop = chat_template(context).stop_token_ids
    return {"temperature": 0.0, "max_tokens": context.spec.evaluation.max_new_tokens, "stop_token_ids": stop}


def _produce(context: StageContext, identity: Identity, writer: ArtifactWriter) -> Produced:
    engine = context.capturing_engine_spec()
    sequences: list[dict[str, Any]] = []
    speeds: list[dict[str, Any]] = []
    starts = 0.0
    for category, rows in prompt_rows(context).items():
        batch = PromptBatch(
            f"baseline {category}",
            context.scratch(identity) / category,
            rows,
            greedy_sampling(context),
            writer.folder,
            include_output=True,
            batch_size=context.spec.evaluation.batch_size,
        )
        answers, speed = run_prompts(context, engine, batch)
        starts += speed["num_engine_starts"]
        found = [_sequence(row, answers[row["sequence_id"]], category) for row in rows]
        sequences += found
        new_tokens = sum(len(s["input_ids"]) - s["num_prompt_tokens"] for s in found)
        elapsed = new_tokens / max(speed["new_tokens_per_s"], 1e-9)
        speeds.append(
            {"category": category, "num_prompts": len(rows), "num_new_tokens": new_tokens, "elapsed_s": elapsed}
        )
    sampling = greedy_sampling(context)
    measure_batch_speeds(context, engine, identity, prompt_rows(context), sampling, writer.folder)
    pq.write_table(pa.Table.from_pylist(sequences, SEQUENCE_SCHEMA), writer.folder / SEQUENCES)
    pq.write_table(pa.Table.from_pylist(speeds, SPEED_SCHEMA), writer.folder / SPEEDS)
    tokens = captured_tokens(sequences)
    records = written_records(writer.folder, context.verifier.geometry(context.spec.capture))
    seal_capture(context, f"{context.spec.name}: baseline", writer.folder, tokens, records, identity.fingerprint)
    total = sum(row["num_new_tokens"] for row in speeds)
    elapsed = sum(row["elapsed_s"] for row in speeds)
    metrics = {
        "num_prompts": len(sequences),
        "num_new_tokens": total,
        "tokens_per_s": total / max(elapsed, 1e-9),
        "num_engine_starts": starts,
    }
    return Produced(rows_content_id(("sequence_id", "input_ids"), sequences), metrics)


def _sequence(row: dict[str, Any], answer: dict[str, Any], category: str) -> dict[str, Any]:
    prompt, sampled = row["input_ids"], answer["token_ids"]
    return {
        "sequence_id": row["sequence_id"],
        "conversation_id": row["sequence_id"],
        "turn": 0,
        "input_ids": [*prompt, *sampled],
        "loss_mask": [False] * len(prompt) + [True] * len(sampled),
        "num_prompt_tokens": len(prompt),
        "text": category,
        "reasoning": "",
        "finish_reason": answer["finish_reason"],
        "mean_logprob": None,
    }
