"""Checks of captured states before they are published; each answers a way in which captures went wrong silently."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa

from eagle3_pipeline.errors import CaptureError
from eagle3_pipeline.store.shards import Geometry, ShardRecord, map_states, shard_name
from eagle3_pipeline.store.threads import in_threads
from eagle3_pipeline.store.values import Seen, look_at


def check_states(
    folder: Path,
    index: pa.Table,
    tokens: dict[str, np.ndarray],
    geometry: Geometry,
    min_variance: float,
    chunk: str,
    records: Mapping[str, ShardRecord] | None = None,
) -> dict[str, float]:
    """Checks that every sequence is there once, with its own tokens, finite values and layers that vary.

    Args:
        folder: sealed shards.
        index: their index.
        tokens: expected input ids [n] by sequence id.
        geometry: shape of a row.
        min_variance: a layer below this variance over the chunk is dead.
        chunk: named in errors.
        records: of the sequences, by whoever wrote them and looked at their values; `None`: all rows are read.

    Returns:
        Statistics: variance of each layer, over all rows of short sequences and 8 to 15 rows of longer ones.

    Raises:
        CaptureError: names the check, the sequence and the position.
    """
    rows = index.to_pylist()
    found = [row["sequence_id"] for row in rows]
    if sorted(found) != sorted(tokens):
        wrong = next(i for i in [*tokens, *found] if found.count(i) != 1 or i not in tokens)
        raise CaptureError(
            f"chunk {chunk}: the index holds {len(found)} sequences, expected {len(tokens)}, each once; "
            f"sequence {wrong} is there {found.count(wrong)} times"
        )
    moments = np.zeros((3, len(geometry.layer_ids)))
    for number in sorted({row["shard"] for row in rows}):
        states, ids = map_states(folder / shard_name(number))
        if states.shape[1:] != (len(geometry.layer_ids), geometry.hidden_size):
            raise CaptureError(f"chunk {chunk}, shard {number}: rows of shape {states.shape[1:]}, expected {geometry}")
        places = {
            row["sequence_id"]: slice(row["row_start"], row["row_start"] + row["num_tokens"])
            for row in rows
            if row["shard"] == number
        }
        for name, place in places.items():
            _check_tokens(name, ids[place], tokens[name], chunk)
        for name, (fault, own) in zip(places, _seen(states, places, geometry, records), strict=True):
            if fault:
                raise CaptureError(f"chunk {chunk}, sequence {name}: {fault}")
            moments += own
    variance = moments[2] / moments[0] - (moments[1] / moments[0]) ** 2
    for layer, value in zip(geometry.layer_ids, variance, strict=True):
        if value < min_variance:
            raise CaptureError(
                f"chunk {chunk}: the states of layer {layer} have variance {value:.3g} over the chunk, "
                f"capture.min_layer_variance asks for {min_variance:.3g}: the verifier does not expose this layer"
            )
    return {f"layer_{layer}_variance": float(v) for layer, v in zip(geometry.layer_ids, variance, strict=True)}


def _seen(
    states: np.ndarray, places: dict[str, slice], geometry: Geometry, records: Mapping[str, ShardRecord] | None
) -> list[Seen]:
    """Fault and moments of each sequence, as `look_at` tells them."""

    def seen(name: str) -> Seen:
        record = records[name] if records else None
        # One that an engine of an earlier version wrote says nothing of the values.
        if record and (record.fault or record.moments):
            return record.fault, record.moments
        own = states[places[name]]
        return look_at(own, [len(own)], geometry.layer_ids)[0]

    return in_threads(seen, places)


def _check_tokens(sequence: str, found: np.ndarray, expected: np.ndarray, chunk: str) -> None:
    if len(found) != len(expected):
        raise CaptureError(f"chunk {chunk}, sequence {sequence}: {len(found)} rows, expected {len(expected)}")
    wrong = np.flatnonzero(found != expected)
    if len(wrong):
        position = int(wrong[0])
        raise CaptureError(
            f"chunk {chunk}, sequence {sequence}: input_ids differ at position {position} "
            f"(expected {expected[position]}, got {found[position]})"
        )
