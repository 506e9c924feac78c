"""Turns captured rows into sealed, checked shards; captures stored sequences by prefill."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.data.verifier_head import load_head
from eagle3_pipeline.engine.smoke import MOST_ROWS_OFF, row_differences, share_off
from eagle3_pipeline.errors import CaptureError, DecodingError
from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.stages.fidelity import check_states
from eagle3_pipeline.stages.next_token import TOP_K, check_greedy, check_sampled, check_teacher, spread_rows
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
# Sequences of a chunk that are captured once more.
_RECAPTURED = 5
# Times the tolerance.
_FAR_OFF = 3


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


def check_recaptured(
    context: StageContext, where: str, folder: Path, rows: list[dict], identity: Identity, decoded: bool
) -> dict[str, float]:
    """Captures some sequences once more, each alone and by prefill, and compares.

    Neither a batch nor decoding must change what a sequence's states are. The rows of prompts and those of answers are
    compared apart: most are prompts', and a wrong recurrence shows in the others only. Of the last row of each the
    engine gives its own log-probabilities, too, which the teacher of training must have.

    Args:
        context: the pipeline.
        where: named in errors.
        folder: sealed shards.
        rows: sequence_id, input_ids, loss_mask of each sequence.
        identity: of the artifact that is made; names the scratch folder.
        decoded: whether the states of answers were captured as they were decoded, not by a prefill.

    Raises:
        DecodingError: states of answers that were decoded differ from those of a prefill of the same tokens.
        CaptureError: others do, or the teacher is not the verifier.
    """
    capture = context.spec.capture
    if not capture.recapture_tolerance and not capture.max_teacher_kl:
        return {}
    parts = _parts_of_answers(rows)
    alone = context.scratch(identity) / "alone"
    shutil.rmtree(alone, ignore_errors=True)
    tokens = {row["sequence_id"]: np.asarray(row["input_ids"][:n], dtype=np.int32) for row, n in parts}
    what = f"capturing {len(parts)} sequences once more"
    batch = _prefill_batch(what, alone, tokens, alone / "states")
    sampling = {**batch.sampling, "logprobs": TOP_K}
    engine = context.capturing_engine_spec()
    answers, _ = run_prompts(context, engine, replace(batch, sampling=sampling, batch_size=1, urgent=True))
    records = complete_records(context, alone / "states", tokens, just_now=True)
    if records is None:
        raise CaptureError(f"{where}: not all of {len(parts)} sequences were captured when they were sent alone")
    seal_shards(alone / "states", records.values(), tokens, context.verifier.geometry(capture), {})
    again = {name: states_of(alone / "states", name) for name in tokens}
    shutil.rmtree(alone)
    found: dict[str, float] = {}
    if capture.recapture_tolerance:
        found |= _compare_states(context, where, folder, parts, again, DecodingError if decoded else CaptureError)
    return found | _compare_teacher(context, where, again, answers)


def _parts_of_answers(rows: list[dict]) -> list[tuple[dict, int]]:
    """Some sequences of different lengths, each with how many of its tokens are captured once more.

    One ends with the first token of its answer, one with the last that has a state, the others in between.
    """
    ordered = sorted(rows, key=lambda row: (len(row["input_ids"]), row["sequence_id"]))
    chosen = [ordered[i] for i in sorted({round(x) for x in np.linspace(0, len(ordered) - 1, _RECAPTURED)})]
    parts = []
    for number, row in enumerate(chosen, 1):
        start, end = _first_of_answer(row), len(row["input_ids"]) - 1
        parts.append((row, max(1, start + round((end - start) * number / len(chosen)))))
    return parts


def _first_of_answer(row: dict) -> int:
    """Position of the first supervised token."""
    return min(row["loss_mask"].index(True), len(row["input_ids"]) - 1) if True in row["loss_mask"] else 0


def _compare_states(
    context: StageContext,
    where: str,
    folder: Path,
    parts: list[tuple[dict, int]],
    again: dict[str, np.ndarray],
    of_answers: type[CaptureError],
) -> dict[str, float]:
    differences: dict[str, list[np.ndarray]] = {"prompts": [], "answers": []}
    for row, n in parts:
        found = row_differences(states_of(folder, row["sequence_id"])[:n], again[row["sequence_id"]])
        start = _first_of_answer(row)
        differences["prompts"].append(found[:start])
        differences["answers"].append(found[start:])
    worst = 0.0
    for what, kind in (("answers", of_answers), ("prompts", CaptureError)):
        worst = max(worst, _require_alike(context, where, what, np.concatenate(differences[what]), kind))
    return {"recapture_difference": worst, "num_recaptured": float(len(parts))}


def _require_alike(context: StageContext, where: str, what: str, rows: np.ndarray, kind: type[CaptureError]) -> float:
    """The largest difference over layers, of differences [n, A+1] of rows.

    Of verifiers with experts the median of rows counts, not the mean: rounding sends a few tokens to other experts. But
    few are few: more than a share of rows far off is an error whatever the median is.
    """
    if not len(rows):
        return 0.0
    tolerance = context.spec.capture.recapture_tolerance
    by_layer = np.median(rows, axis=0) if context.verifier.has_experts else np.sqrt(np.mean(rows**2, axis=0))
    layer, off = int(by_layer.argmax()), share_off(rows, _FAR_OFF * tolerance)
    if by_layer[layer] > tolerance:
        name = context.verifier.geometry(context.spec.capture).layer_ids[layer]
        raise kind(
            f"{where}: the states of {what} at layer {name} differ by {by_layer[layer]:.1%} from those of the same "
            f"sequence captured alone, by prefill; capture.recapture_tolerance allows {tolerance:.0%}"
        )
    if off > MOST_ROWS_OFF:
        raise kind(
            f"{where}: {off:.0%} of {len(rows)} states of {what} differ by more than {_FAR_OFF} times "
            f"capture.recapture_tolerance ({tolerance:.0%}) from those of the same sequence captured alone, by "
            f"prefill; {MOST_ROWS_OFF:.0%} may"
        )
    return float(by_layer[layer])


def _compare_teacher(
    context: StageContext, where: str, again: dict[str, np.ndarray], answers: dict[str, dict[str, Any]]
) -> dict[str, float]:
    most, head = context.spec.capture.max_teacher_kl, load_head(context.verifier.path)
    told = [answers[name] for name in again]
    if not most or head is None or any(answer.get("top_tokens") is None for answer in told):
        if most:
            reason = "this engine tells no log-probabilities" if head else "this verifier's output layer is not known"
            context.log(f"{where}: {reason}; the teacher is not checked")
        return {}
    last = np.stack([states[-1, -1] for states in again.values()])
    tokens, logprobs = ([answer[key][0] for answer in told] for key in ("top_tokens", "top_logprobs"))
    return check_teacher(head, last, tokens, logprobs, most, where)


def states_of(folder: Path, sequence_id: str) -> np.ndarray:
    """States [n, A+1, H] float32 of one sequence of a sealed folder."""
    place = next(row for row in read_index(folder).to_pylist() if row["sequence_id"] == sequence_id)
    states, _ = map_states(folder / shard_name(place["shard"]))
    return bf16_to_float32(states[place["row_start"] : place["row_start"] + place["num_tokens"]])
