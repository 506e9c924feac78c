"""What is said of the values of a sequence, against a look at each of them."""

import numpy as np
import pytest
import torch

from eagle3_pipeline.store.values import look_at

LAYERS = (2, 5, 8)


def _states(num_rows: int, hidden_size: int = 16) -> np.ndarray:
    values = torch.randn(num_rows, 3, hidden_size, generator=torch.Generator().manual_seed(num_rows))
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def _floats(states: np.ndarray) -> np.ndarray:
    return torch.from_numpy(states.copy()).view(torch.bfloat16).double().numpy()


# Blocks of rows are looked at together: 512 KiB are 5,461 rows of 96 bytes.
@pytest.mark.parametrize(("num_rows", "step"), [(1, 1), (31, 1), (63, 1), (64, 2), (204, 6), (12_000, 375)])
def test_moments_are_those_of_rows_evenly_over_the_sequence(num_rows: int, step: int) -> None:
    states = _states(num_rows)
    rows = _floats(states)[::step]
    fault, moments = look_at(states, LAYERS)
    assert fault == ""
    assert moments[0] == [rows.shape[0] * 16.0] * 3
    assert moments[1] == pytest.approx(rows.sum(axis=(0, 2)).tolist(), abs=1e-3)
    assert moments[2] == pytest.approx((rows**2).sum(axis=(0, 2)).tolist(), rel=1e-6)


def test_every_single_bad_value_of_a_long_sequence_is_found() -> None:
    states = _states(6000)
    for position in (0, 1, 5460, 5461, 5999):
        for bits in (0x7F80, 0xFF80, 0x7FC0, 0xFFFF):
            damaged = states.copy()
            damaged[position, 1, 15] = bits
            assert look_at(damaged, LAYERS) == (f"the states of layer 5 are not finite at position {position}", [])


def test_the_largest_finite_value_and_zeros_among_others_are_none() -> None:
    states = _states(4)
    states[2, 0, :15] = 0x8000
    states[3, 1, 0], states[3, 1, 1] = 0x7F7F, 0xFF7F
    fault, moments = look_at(states, LAYERS)
    assert fault == "" and np.isfinite(moments).all()


def test_of_several_faults_the_first_is_named() -> None:
    states = _states(9)
    states[7, 0, 0] = 0x7FC0
    states[4, 2, 3] = 0x7F80
    states[1, 1, :] = 0
    assert look_at(states, LAYERS)[0] == "the states of layer 8 are not finite at position 4"
    states[4, 2, 3] = states[7, 0, 0] = 1
    assert look_at(states, LAYERS)[0] == "the states of layer 5 are all zero at position 1"


def test_an_empty_sequence_has_neither() -> None:
    assert look_at(_states(0), LAYERS) == ("", [[0.0] * 3] * 3)
