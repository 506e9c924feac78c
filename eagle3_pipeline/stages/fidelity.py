"""Checks of captured states before they are published; each answers a way in which captures went wrong silently."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from eagle3_pipeline.errors import CaptureError
from eagle3_pipeline.store.shards import Geometry, bf16_to_float32, map_states, shard_name

_BLOCK_ROWS = 4096


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
        Statistics: variance of each layer.

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
        for row in (r for r in rows if r["shard"] == number):
            start, end = row["row_start"], row["row_start"] + row["num_tokens"]
            _check_tokens(row["sequence_id"], ids[start:end], tokens[row["sequence_id"]], chunk)
            for block in range(start, end, _BLOCK_ROWS):
                values = bf16_to_float32(states[block : min(block + _BLOCK_ROWS, end)])
                _check_values(row["sequence_id"], values, block - start, geometry, chunk)
                moments += np.stack([np.full(values.shape[1], values[:, 0].size), *_sums(values)])
    variance = moments[2] / moments[0] - (moments[1] / moments[0]) ** 2
    for layer, value in zip(geometry.layer_ids, variance, strict=True):
        if value < min_variance:
            raise CaptureError(
                f"chunk {chunk}: the states of layer {layer} have variance {value:.3g} over the chunk, "
                f"capture.min_layer_variance asks for {min_variance:.3g}: the verifier does not expose this layer"
            )
    return {f"layer_{layer}_variance": float(v) for layer, v in zip(geometry.layer_ids, variance, strict=True)}


def _sums(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values.sum(axis=(0, 2), dtype=np.float64), np.square(values, dtype=np.float64).sum(axis=(0, 2))


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


def _check_values(sequence: str, values: np.ndarray, offset: int, geometry: Geometry, chunk: str) -> None:
    """Values are [rows, A+1, H]: finite, and no row of a layer all zero."""
    for name, bad in (
        ("not finite", ~np.isfinite(values).all(axis=2)),
        ("all zero", ~values.any(axis=2)),
    ):
        if bad.any():
            row, layer = (int(i) for i in np.argwhere(bad)[0])
            raise CaptureError(
                f"chunk {chunk}, sequence {sequence}: the states of layer {geometry.layer_ids[layer]} are {name} "
                f"at position {offset + row}"
            )
