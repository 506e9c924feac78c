"""Turns captured rows into sealed, checked shards; captures stored sequences by prefill."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from eagle3_pipeline.data.verifier_head import load_head
from eagle3_pipeline.errors import CaptureError
from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.stages.fidelity import check_states
from eagle3_pipeline.stages.next_token import check_greedy, check_sampled, spread_rows
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.store.fingerprint import ids_checksum
from eagle3_pipeline.store.records import intact_records, written_records
from eagle3_pipeline.store.shards import (
    LAYER_CONVENTION,
    ShardRecord,
    bf16_to_float32,
    map_states,
    prefetch_rows,
    read_index,
    seal_shards,
    shard_name,
)

Tokens = dict[str, np.ndarray]


def captured_tokens(rows: list[dict]) -> Tokens:
    """Input ids [n-1] of each sequence, by its id: the state of the last token predicts nothing that is trained on."""
    return {row["sequence_id"]: np.asarray(row["input_ids"][:-1], dtype=np.int32) for row in rows}


def complete_records(
    context: StageContext, folder: Path, tokens: Tokens, just_now: bool
) -> dict[str, ShardRecord] | None:
    """The records of all sequences, if every one is there, intact and of the sequence's own tokens.

    What was written `just_now`, by a pass that began with a look at what was there, is not read once more.
    """
    recorded = written_records if just_now else intact_records
    records = recorded(folder, context.verifier.geometry(context.spec.capture))
    complete = all(i in records and records[i].ids == ids_checksum(ids) for i, ids in tokens.items())
    return records if complete else None


def prefill(context: StageContext, what: str, tokens: Tokens, identity: Identity, folder: Path) -> dict[str, float]:
    """Captures stored sequences into `folder`; returns the engine's speed."""
    num_tokens = sum(map(len, tokens.values()))
    context.engines.require_startable(context.capturing_engine_spec())
    context.require_capture_space(folder, num_tokens)
    scratch = context.scratch(identity)
    _, speed = run_prompts(context, context.capturing_engine_spec(), _prefill_batch(what, scratch, tokens, folder))
    shutil.rmtree(scratch, ignore_errors=True)
    return speed


def _prefill_batch(what: str, scratch: Path, tokens: Tokens, folder: Path) -> PromptBatch:
    rows = [{"sequence_id": i, "input_ids": ids.tolist()} for i, ids in tokens.items()]
    return PromptBatch(what, scratch, rows, {"temperature": 0.0, "max_tokens": 1}, folder)


def seal_capture(
    context: StageContext,
    where: str,
    folder: Path,
    tokens: Tokens,
    records: Mapping[str, ShardRecord],
    fingerprint: str,
) -> dict[str, float]:
    """Seals the shards of `folder` and checks what they hold; returns the checks' statistics.

    Raises:
        CaptureError: a sequence is missing, or a check fails.
    """
    missing = [i for i in tokens if i not in records]
    if missing:
        raise CaptureError(
            f"{where}: {len(missing)} of {len(tokens)} sequences have no intact states, first: {missing[0]}"
        )
    others = [i for i, ids in tokens.items() if records[i].ids != ids_checksum(ids)]
    if others:
        raise CaptureError(
            f"{where}: the states of {len(others)} of {len(tokens)} sequences are those of other tokens, first: "
            f"{others[0]}"
        )
    geometry = context.verifier.geometry(context.spec.capture)
    metadata = {
        "verifier": context.verifier.content_id,
        "layer_ids": list(geometry.layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "fingerprint": fingerprint,
    }
    index = seal_shards(folder, [records[i] for i in tokens], tokens, geometry, metadata)
    return check_states(folder, index, tokens, geometry, context.spec.capture.min_layer_variance, where, records)


def check_answers(context: StageContext, where: str, folder: Path, rows: list[dict]) -> dict[str, float]:
    """Checks last-layer states against the answers that the verifier gave itself, where it did.

    Args:
        context: the pipeline.
        where: named in errors.
        folder: sealed shards.
        rows: sequence_id, input_ids, loss_mask of each sequence.

    Raises:
        CaptureError: the states do not predict the answers.
    """
    generation, minimum = context.spec.generation, context.spec.capture.min_next_token_agreement
    if not minimum or generation.mode == "passthrough":
        return {}
    head = load_head(context.verifier.path)
    if head is None:
        context.log(f"{where}: this verifier's output layer is not a plain one; next tokens are not checked")
        return {}
    states, tokens = answer_states(folder, rows)
    if generation.temperature == 0:
        return check_greedy(head, states, tokens, minimum, where)
    return check_sampled(head, states, tokens, where)


def answer_states(folder: Path, rows: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Last-layer states [R, H] that predict supervised tokens, and those tokens [R]; R rows evenly over the chunk."""
    known = [(row, j) for row in rows for j in range(len(row["input_ids"]) - 1) if row["loss_mask"][j + 1]]
    index = {row["sequence_id"]: row for row in read_index(folder).to_pylist()}
    shards = {number: map_states(folder / shard_name(number))[0] for number in {r["shard"] for r in index.values()}}
    chosen = [known[position] for position in spread_rows(len(known))]
    found = [(index[row["sequence_id"]], j) for row, j in chosen]
    places = [(place["shard"], place["row_start"] + j) for place, j in found]
    for number in shards:
        prefetch_rows(folder / shard_name(number), [row for shard, row in places if shard == number])
    states = [shards[number][row, -1] for number, row in places]
    return bf16_to_float32(np.stack(states)), np.asarray([row["input_ids"][j + 1] for row, j in chosen])


def check_alone(
    context: StageContext, where: str, folder: Path, tokens: Tokens, identity: Identity
) -> dict[str, float]:
    """Captures one sequence once more, alone, and compares: a batch must not change what a sequence's states are.

    Skipped where no engine runs: a load for this check alone would cost more than it tells.

    Raises:
        CaptureError: the two captures differ by more than `capture.recapture_tolerance`.
    """
    tolerance, engine = context.spec.capture.recapture_tolerance, context.capturing_engine_spec()
    if not tolerance or not context.engines.is_running(engine):
        return {}
    chosen = sorted(tokens, key=lambda i: (len(tokens[i]), i))[len(tokens) // 2]
    alone = context.scratch(identity) / "alone"
    shutil.rmtree(alone, ignore_errors=True)
    single = {chosen: tokens[chosen]}
    batch = _prefill_batch("capturing one sequence alone", alone, single, alone / "states")
    run_prompts(context, engine, replace(batch, urgent=True))
    records = complete_records(context, alone / "states", single, just_now=True)
    if records is None:
        raise CaptureError(f"{where}: sequence {chosen} was not captured when it was sent alone")
    geometry = context.verifier.geometry(context.spec.capture)
    seal_shards(alone / "states", records.values(), single, geometry, {})
    both = states_of(folder, chosen), states_of(alone / "states", chosen)
    difference = (_median_difference if context.verifier.has_experts else _difference)(*both)
    shutil.rmtree(alone)
    worst = int(difference.argmax())
    if difference[worst] > tolerance:
        layer = geometry.layer_ids[worst]
        raise CaptureError(
            f"{where}: the states of sequence {chosen} at layer {layer} differ by {difference[worst]:.1%} from those "
            f"of the same sequence captured alone, capture.recapture_tolerance allows {tolerance:.0%}"
        )
    return {"recapture_difference": float(difference[worst])}


def states_of(folder: Path, sequence_id: str) -> np.ndarray:
    """States [n, A+1, H] float32 of one sequence of a sealed folder."""
    place = next(row for row in read_index(folder).to_pylist() if row["sequence_id"] == sequence_id)
    states, _ = map_states(folder / shard_name(place["shard"]))
    return bf16_to_float32(states[place["row_start"] : place["row_start"] + place["num_tokens"]])


def _difference(batched: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """Relative difference of each layer [A+1]."""
    return np.linalg.norm(batched - alone, axis=(0, 2)) / np.linalg.norm(alone, axis=(0, 2))


def _median_difference(batched: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """Of each layer [A+1], the median of its rows: a few tokens that rounding sends to other experts are no fault."""
    return np.median(np.linalg.norm(batched - alone, axis=2) / np.linalg.norm(alone, axis=2), axis=0)
