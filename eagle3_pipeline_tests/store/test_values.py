"""What is said of the values of a sequence, against a look at each of them."""

import numpy as np
import pytest
import torch

from eagle3_pipeline.store.values import Seen, look_at

LAYERS = (2, 5, 8)


def _states(num_rows: int, hidden_size: int = 16) -> np.ndarray:
    values = torch.randn(num_rows, 3, hidden_size, generator=torch.Generator().manual_seed(num_rows))
    return values.to(torch.bfloat16).view(torch.uint16).numpy()


def _look(states: np.ndarray) -> Seen:
    return look_at(states, [len(states)], LAYERS)[0]


def _floats(states: np.ndarray) -> np.ndarray:
    return torch.from_numpy(states.copy()).view(torch.bfloat16).double().numpy()


@pytest.mark.parametrize(("num_rows", "step"), [(1, 1), (7, 1), (15, 1), (16, 2), (204, 25), (12_000, 1500)])
def test_moments_are_those_of_rows_evenly_over_the_sequence(num_rows: int, step: int) -> None:
    states = _states(num_rows)
    rows = _floats(states)[::step]
    fault, moments = _look(states)
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
            assert _look(damaged) == (f"the states of layer 5 are not finite at position {position}", [])


def test_the_largest_finite_value_and_zeros_among_others_are_none() -> None:
    states = _states(4)
    states[2, 0, :15] = 0x8000
    states[3, 1, 0], states[3, 1, 1] = 0x7F7F, 0xFF7F
    fault, moments = _look(states)
    assert fault == "" and np.isfinite(moments).all()


def test_of_several_faults_the_first_is_named() -> None:
    states = _states(9)
    states[7, 0, 0] = 0x7FC0
    states[4, 2, 3] = 0x7F80
    states[1, 1, :] = 0
    assert _look(states)[0] == "the states of layer 8 are not finite at position 4"
    states[4, 2, 3] = states[7, 0, 0] = 1
    assert _look(states)[0] == "the states of layer 5 are all zero at position 1"


def test_an_empty_sequence_has_neither() -> None:
    assert _look(_states(0)) == ("", [[0.0] * 3] * 3)


def _alone(states: np.ndarray, lengths: list[int]) -> list[Seen]:
    ends = np.cumsum(lengths)
    return [_look(states[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


@pytest.mark.parametrize("lengths", [[5], [0], [0, 0], [0, 3, 0, 0, 70, 1, 0], [1] * 40, [300, 9, 16, 15]])
def test_of_many_sequences_each_is_seen_as_alone(lengths: list[int]) -> None:
    states = _states(sum(lengths))
    for bad in ([], [0], [len(states) - 1], range(0, len(states), 3)):
        for row in bad if len(states) else []:
            states[row, row % 3, 5] = 0x7FC0
        found, expected = look_at(states, lengths, LAYERS), _alone(states, lengths)
        assert [fault for fault, _ in found] == [fault for fault, _ in expected]
        for (_, own), (_, other) in zip(found, expected, strict=True):
            assert own == [pytest.approx(row) for row in other]


def test_moments_of_more_rows_than_are_summed_together_are_each_sequence_own() -> None:
    # 2**18 values are 5,461 rows of 48; of each sequence of 16 rows 8 are summed.
    lengths = [16] * 1000
    states = _states(sum(lengths))
    sums = _floats(states)[::2].reshape(1000, 8, 3, 16)
    found = np.array([moments for _, moments in look_at(states, lengths, LAYERS)])
    assert found[:, 0] == pytest.approx(np.full((1000, 3), 8 * 16.0))
    assert found[:, 1] == pytest.approx(sums.sum(axis=(1, 3)), abs=1e-9)
    assert found[:, 2] == pytest.approx((sums**2).sum(axis=(1, 3)))


@pytest.mark.filterwarnings("error")
def test_garbage_has_a_fault_in_each_sequence_and_nothing_is_warned_of() -> None:
    states = np.random.default_rng(0).integers(0, 2**16, (6000, 3, 600), dtype=np.uint16)
    found = look_at(states, [2000, 1000, 3000], LAYERS)
    assert all("are not finite at position" in fault and not moments for fault, moments in found)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bad", [(0x7F80, 0xFF80), (0x7F80, 0x7F80), (0x7FA0, 0x7FC0), (0x7F7F, 0xFF7F)])
def test_nothing_is_warned_of_whatever_values_meet(bad: tuple[int, int]) -> None:
    states = _states(4)
    states[0, 0, 0], states[1, 0, 0] = bad
    fault, _ = _look(states)
    assert fault == ("" if bad[0] == 0x7F7F else "the states of layer 2 are not finite at position 0")
    states[0, 0, 1] = bad[1]
    _look(states)


def test_of_no_sequences_nothing_is_said() -> None:
    assert look_at(_states(0), [], LAYERS) == []
