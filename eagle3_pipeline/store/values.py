"""What the values of captured states tell; looked at while they are in memory, so that nothing is read back for it."""

from collections.abc import Iterator, Sequence

import numpy as np

from eagle3_pipeline.store.shards import bf16_to_float32

# Rows that are looked at together: they stay in a processor's cache.
_BLOCK_BYTES = 2**19
# Rows of a sequence, evenly over it, that enter its moments: as many at least, all of a shorter one.
_MOMENT_ROWS = 32
# Twice the bits of bf16 infinity.
_INFINITY = 0xFF00


def look_at(states: np.ndarray, layer_ids: Sequence[int]) -> tuple[str, list[list[float]]]:
    """Looks at the states of a sequence.

    Args:
        states: bf16 bits (uint16) [n, A+1, H].
        layer_ids: ids of the A+1 layers.

    Returns:
        The first value that is not finite, or the first row of a layer that is all zero, as text; empty: there is none.
        Moments [3][A+1] of states without a fault: number, sum and sum of squares of each layer's values, of 32 to 63
        rows of a longer sequence.
    """
    if fault := _fault(states, layer_ids):
        return fault, []
    return "", _moments(states[:: max(1, len(states) // _MOMENT_ROWS)]).tolist()


def _fault(states: np.ndarray, layer_ids: Sequence[int]) -> str:
    # Without its sign a bf16 value orders as an integer: zero is the lowest, infinities and NaN are the highest.
    largest = [(block << np.uint16(1)).max(axis=2) for block in _blocks(states)]
    magnitudes = np.concatenate(largest) if largest else np.ones((0, states.shape[1]), dtype=np.uint16)
    for what, bad in (("not finite", magnitudes >= _INFINITY), ("all zero", magnitudes == 0)):
        if bad.any():
            position, layer = np.argwhere(bad)[0]
            return f"the states of layer {layer_ids[layer]} are {what} at position {position}"
    return ""


def _moments(states: np.ndarray) -> np.ndarray:
    moments = np.zeros((3, states.shape[1]))
    for block in _blocks(states):
        values = bf16_to_float32(block)
        squares = np.square(values, dtype=np.float64).sum(axis=(0, 2))
        moments += [np.full(values.shape[1], values[:, 0].size), values.sum(axis=(0, 2), dtype=np.float64), squares]
    return moments


def _blocks(states: np.ndarray) -> Iterator[np.ndarray]:
    rows = max(1, _BLOCK_BYTES // (states[0].nbytes or 1)) if len(states) else 1
    return (states[start : start + rows] for start in range(0, len(states), rows))
