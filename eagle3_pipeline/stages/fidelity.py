"""Checks of captured states before they are published; each answers a way in which captures went wrong silently."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from eagle3_pipeline.errors import CaptureError
from eagle3_pipeline.store.shards import Geometry, bf16_to_float32, map_states, shard_name
from eagle3_pipeline.store.threads import in_threads

_BLOCK_BYTES = 2**22
# Rows, evenly over the chunk, from which variances are estimated.
_VARIANCE_ROWS = 4096
# Twice the bits of bf16 infinity.
_INFINITY = 0xFF00


def check_states(
    folder: Path, index: pa.Table, tokens: dict[str, np.ndarray], geometry: Geometry, min_variance: float, chunk: str
) -> dict[str, float]:
    """Checks that every sequence is there once, with its own tokens, finite values and layers that vary.

    Args:
        folder: sealed shards.
        index: their index.
        tokens: expected input ids [n] by sequence id.
        geometry: shape of a row.
        min_variance: a layer below this variance over the chunk is dead.
        chunk: named in errors.

    Returns:
        Statistics: variance of each layer, over all rows of small chunks, over 4,096 to 8,191 rows of larger ones.

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
    stride = max(1, sum(map(len, tokens.values())) // _VARIANCE_ROWS)
    for number in sorted({row["shard"] for row in rows}):
        states, ids = map_states(folder / shard_name(number))
        if states.shape[1:] != (len(geometry.layer_ids), geometry.hidden_size):
            raise CaptureError(f"chunk {chunk}, shard {number}: rows of shape {states.shape[1:]}, expected {geometry}")
        places = [row for row in rows if row["shard"] == number]
        for row in places:
            start, end = row["row_start"], row["row_start"] + row["num_tokens"]
            _check_tokens(row["sequence_id"], ids[start:end], tokens[row["sequence_id"]], chunk)
        _check_values(states, places, geometry, chunk)
        moments += _moments(states[::stride])
    variance = moments[2] / moments[0] - (moments[1] / moments[0]) ** 2
    for layer, value in zip(geometry.layer_ids, variance, strict=True):
        if value < min_variance:
            raise CaptureError(
                f"chunk {chunk}: the states of layer {layer} have variance {value:.3g} over the chunk, "
                f"capture.min_layer_variance asks for {min_variance:.3g}: the verifier does not expose this layer"
            )
    return {f"layer_{layer}_variance": float(v) for layer, v in zip(geometry.layer_ids, variance, strict=True)}


def _moments(states: np.ndarray) -> np.ndarray:
    """[3, A+1]: number, sum and sum of squares of each layer's values, of bf16 bits [rows, A+1, H]."""
    moments = np.zeros((3, states.shape[1]))
    for block in _blocks(states):
        values = bf16_to_float32(block)
        squares = np.square(values, dtype=np.float64).sum(axis=(0, 2))
        moments += [np.full(values.shape[1], values[:, 0].size), values.sum(axis=(0, 2), dtype=np.float64), squares]
    return moments


def _blocks(states: np.ndarray) -> Iterator[np.ndarray]:
    """Parts that stay in a processor's cache while they are worked on."""
    rows = max(1, _BLOCK_BYTES // (states[0].nbytes or 1)) if len(states) else 1
    return (states[start : start + rows] for start in range(0, len(states), rows))


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


def _check_values(states: np.ndarray, places: list[dict], geometry: Geometry, chunk: str) -> None:
    """Of bf16 bits [rows, A+1, H]: all finite, and no row of a layer all zero."""
    # Without its sign a bf16 value orders as an integer: zero is the lowest, infinities and NaN are the highest.
    largest = in_threads(lambda block: (block << np.uint16(1)).max(axis=2), _blocks(states))
    magnitudes = np.concatenate(largest)
    for name, bad in (("not finite", magnitudes >= _INFINITY), ("all zero", magnitudes == 0)):
        for position, layer in np.argwhere(bad):
            place = next((p for p in places if 0 <= position - p["row_start"] < p["num_tokens"]), None)
            if place:
                raise CaptureError(
                    f"chunk {chunk}, sequence {place['sequence_id']}: the states of layer {geometry.layer_ids[layer]} "
                    f"are {name} at position {position - place['row_start']}"
                )
