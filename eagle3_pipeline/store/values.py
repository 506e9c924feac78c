"""What the values of captured states tell; looked at while they are in memory, so that nothing is read back for it.

Many sequences at once, in few calls: the engine's own thread needs Python's lock as well, and each call of numpy gives
it up and has to wait for it again.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from eagle3_pipeline.store.shards import bf16_to_float32

# Values that are turned into numbers together: of more, their memory would be new each time, which takes longest.
_BLOCK_VALUES = 2**18
# Rows of a sequence, evenly over it, that enter its moments: as many at least, all of a shorter one.
_MOMENT_ROWS = 8
# Bits of bf16, and of it without its sign.
_INFINITY, _MAGNITUDE = 0x7F80, 0x7FFF

Seen = tuple[str, list[list[float]]]


def look_at(states: np.ndarray, lengths: Sequence[int], layer_ids: Sequence[int]) -> list[Seen]:
    """Looks at the states of sequences.

    Args:
        states: bf16 bits (uint16) [sum of lengths, A+1, H].
        lengths: rows of each sequence.
        layer_ids: ids of the A+1 layers.

    Returns:
        Of each sequence the first value that is not finite, or the first row of a layer that is all zero, as text;
        empty: there is none. And moments [3][A+1] of states without a fault: number, sum and sum of squares of each
        layer's values, of 8 to 15 rows of a longer sequence.
    """
    if not lengths:
        return []
    starts = np.cumsum([0, *lengths])
    faults = _faults(states, starts, layer_ids)
    return [(fault, [] if fault else own) for fault, own in zip(faults, _moments(states, starts), strict=True)]


def _faults(states: np.ndarray, starts: np.ndarray, layer_ids: Sequence[int]) -> list[str]:
    # As an unsigned integer the lowest negative value is the largest of a row, as a signed one the highest.
    negative, positive = states.max(axis=2, initial=0), states.view(np.int16).max(axis=2, initial=0)
    magnitudes = np.maximum(negative & _MAGNITUDE, positive)
    kinds = [("not finite", magnitudes >= _INFINITY), ("all zero", magnitudes == 0)]
    found = [""] * (len(starts) - 1)
    for what, bad in kinds:
        rows = np.flatnonzero(bad.any(axis=1))
        # Of garbage every row is bad: the first of each sequence.
        numbers, firsts = np.unique(np.searchsorted(starts, rows, side="right") - 1, return_index=True)
        for number, row in zip(numbers, rows[firsts], strict=True):
            layer, position = layer_ids[int(bad[row].argmax())], row - starts[number]
            found[number] = found[number] or f"the states of layer {layer} are {what} at position {position}"
    return found


def _moments(states: np.ndarray, starts: np.ndarray) -> list[list[list[float]]]:
    """Moments [3][A+1] of each sequence."""
    rows = [np.arange(a, b, max(1, (b - a) // _MOMENT_ROWS)) for a, b in itertools.pairwise(starts)]
    counts = np.array([len(own) for own in rows])
    # Sums of values that are not finite are thrown away.
    with np.errstate(invalid="ignore"):
        # A row more, of zeros: where the last sequence is empty its first row would not be there.
        sums = np.add.reduceat(_row_sums(states, np.concatenate(rows)), np.cumsum(counts) - counts, axis=0)
    sums[counts == 0] = 0.0
    numbers = np.repeat(counts * float(states.shape[2]), states.shape[1]).reshape(-1, 1, states.shape[1])
    return np.concatenate([numbers, sums], axis=1).tolist()


def _row_sums(states: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Sums of the values and of their squares [n+1, 2, A+1] of n rows, and zeros."""
    sums = np.zeros((len(rows) + 1, 2, states.shape[1]))
    at_once = max(1, _BLOCK_VALUES // (states[:1].size or 1))
    for start in range(0, len(rows), at_once):
        block = rows[start : start + at_once]
        own = sums[start : start + len(block)]
        values = bf16_to_float32(states[block]).astype(np.float64)
        values.sum(axis=2, out=own[:, 0])
        np.einsum("nah,nah->na", values, values, out=own[:, 1])
    return sums
