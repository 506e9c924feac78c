"""The `baseline` asset: the undrafted verifier's greedy answers to the evaluation prompts, their states, its speed.

Cached per verifier, so a new draft costs one load. The states let the draft be teacher-forced on the sequences that
are served: greedy decoding with a draft gives the same ones. Speed is that of an engine that does not capture, which
costs a load of its own: decoding one by one, a capturing engine is less than half as fast on a GPU, and every draft
would seem to gain what capture costs.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.data.sequences import SEQUENCE_SCHEMA
from eagle3_pipeline.errors import DecodingError, EngineError
from eagle3_pipeline.evaluation.prompts import read_prompt_bytes
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.capture import captured_tokens, check_recaptured, prefill, seal_capture
from eagle3_pipeline.stages.context import Identity, Produced, StageContext, StageResult
from eagle3_pipeline.stages.engines import choose_passes, timed_engine
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.speeds import Prompts, greedy_sampling, measure_batch_speeds, time_answers, warm_up
from eagle3_pipeline.stages.templates import answer_text, chat_template, prompt_rows, question_rows
from eagle3_pipeline.store.atomic import fsync_path, write_bytes
from eagle3_pipeline.store.fingerprint import rows_content_id
from eagle3_pipeline.store.objects import ArtifactWriter
from eagle3_pipeline.store.records import written_records
from eagle3_pipeline.store.shards import recorded_checksums

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


def _produce(context: StageContext, identity: Identity, writer: ArtifactWriter) -> Produced:
    prompt_rows(context)
    # What cannot be timed is not answered either.
    context.engines.require_startable(context.timed_engine_spec())
    sequences, starts = _answer_once(context, identity, writer.folder)
    speeds, started = _measure_speeds(context, identity, writer.folder, asked(sequences))
    pq.write_table(pa.Table.from_pylist(speeds, SPEED_SCHEMA), writer.folder / SPEEDS)
    total = sum(row["num_new_tokens"] for row in speeds)
    elapsed = sum(row["elapsed_s"] for row in speeds)
    metrics = {
        "num_prompts": len(sequences),
        "num_new_tokens": total,
        "tokens_per_s": total / elapsed,
        "num_engine_starts": starts + started,
    }
    content_id = rows_content_id(("sequence_id", "input_ids"), sequences)
    return Produced(content_id, metrics, checksums=recorded_checksums(writer.folder))


def asked(sequences: list[dict[str, Any]]) -> Prompts:
    """The prompts that were answered, by category: sequence_id, input_ids."""
    by_category: Prompts = {}
    for row in sequences:
        prompt = {"sequence_id": row["sequence_id"], "input_ids": row["input_ids"][: row["num_prompt_tokens"]]}
        by_category.setdefault(row["text"], []).append(prompt)
    return by_category


def _answer_once(context: StageContext, identity: Identity, folder: Path) -> tuple[list[dict[str, Any]], float]:
    """Answers whose states are sealed in `folder`, and engine starts; an earlier life's are not made again.

    It may have ended in the load that follows. Answers to other prompts than those rendered now are of no use.
    """
    path = folder / SEQUENCES
    if path.exists():
        sequences = pq.read_table(path).to_pylist()
        if _answers_these(context, sequences):
            return sequences, 0.0
        context.log(f"{context.spec.name}: the evaluation prompts are rendered otherwise than before: answering anew")
        _clear(context, identity, folder)
    passes = choose_passes(context, sampled=False)
    sequences, starts = _answer(context, identity, folder, passes.together)
    starts += passes.num_engine_starts
    tokens = captured_tokens(sequences)
    if not passes.together:
        starts += prefill(context, "capturing the baseline", tokens, identity, folder)["num_engine_starts"]
    records = written_records(folder, context.verifier.geometry(context.spec.capture))
    where = f"{context.spec.name}: baseline"
    seal_capture(context, where, folder, tokens, records, identity.fingerprint)
    try:
        check_recaptured(context, where, folder, sequences, identity, passes.together)
    except DecodingError as error:
        context.engines.distrust(context.capturing_engine_spec(), str(error))
        _clear(context, identity, folder)
        raise
    # The file that follows says, to the next life too, that these are whole.
    for sealed in filter(Path.is_file, folder.iterdir()):
        fsync_path(sealed)
    table = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(sequences, SEQUENCE_SCHEMA), table)
    write_bytes(path, table.getvalue().to_pybytes())
    return sequences, starts


def _clear(context: StageContext, identity: Identity, folder: Path) -> None:
    """Forgets the answers of an earlier life, and their states."""
    for left in filter(Path.is_file, folder.iterdir()):
        left.unlink()
    shutil.rmtree(context.scratch(identity), ignore_errors=True)


def _answers_these(context: StageContext, sequences: list[dict[str, Any]]) -> bool:
    """Whether stored answers are those to the prompts as they are rendered now."""
    stored = {row["sequence_id"]: row for row in sequences}
    answers: dict[str, str] = {}
    found = set[str]()
    number, template = 0, chat_template(context)
    while rows := _all(question_rows(context, number, answers)):
        for row in rows:
            before = stored.get(row["sequence_id"])
            if before is None or before["input_ids"][: before["num_prompt_tokens"]] != row["input_ids"]:
                return False
            sampled = before["input_ids"][before["num_prompt_tokens"] :]
            answers[row["sequence_id"]] = answer_text(template, row["input_ids"], sampled)
            found.add(row["sequence_id"])
        number += 1
    return found == set(stored)


def _all(prompts: Prompts) -> list[dict[str, Any]]:
    return [row for rows in prompts.values() for row in rows]


def _answer(
    context: StageContext, identity: Identity, folder: Path, together: bool
) -> tuple[list[dict[str, Any]], float]:
    """Answers, `together` with their states in `folder`; engine starts. Of chats one turn of all after the other."""
    engine = context.capturing_engine_spec() if together else context.engine_spec()
    sequences: list[dict[str, Any]] = []
    starts, number, texts = 0.0, 0, dict[str, str]()
    template = chat_template(context)
    while by_category := question_rows(context, number, texts):
        scratch = context.scratch(identity) / f"turn-{number + 1}" if number else context.scratch(identity)
        for category, rows in by_category.items():
            batch = PromptBatch(
                f"baseline {category}",
                scratch / category,
                rows,
                greedy_sampling(context),
                folder if together else None,
                include_output=together,
                batch_size=context.spec.evaluation.batch_size,
            )
            answers, speed = run_prompts(context, engine, batch)
            starts += speed["num_engine_starts"]
            for row in rows:
                answer = answers[row["sequence_id"]]
                sequences.append(_sequence(row, answer, category))
                texts[row["sequence_id"]] = answer_text(template, row["input_ids"], answer["token_ids"])
        number += 1
    return sequences, starts


def _measure_speeds(
    context: StageContext, identity: Identity, folder: Path, prompts: Prompts
) -> tuple[list[dict[str, Any]], float]:
    """Speed of each category, and at further batch sizes in `folder`; engine starts."""
    engine, speeds = context.timed_engine_spec(), []
    with timed_engine(context, engine) as client:
        warm_up(context, engine, identity, prompts)
        for category, rows in prompts.items():
            what, size = f"undrafted {category}", context.spec.evaluation.batch_size
            timed = time_answers(context, engine, identity, what, rows, size)
            counts = {"num_prompts": len(rows), "num_new_tokens": timed.num_new_tokens}
            speeds.append({"category": category, **counts, "elapsed_s": timed.elapsed_s})
        measure_batch_speeds(context, engine, identity, prompts, folder)
        # Who comes next need not wait until it has been idle for long.
        with contextlib.suppress(EngineError):
            client.request("retire", idle_s=0.0)
    return speeds, float(client.started)


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
