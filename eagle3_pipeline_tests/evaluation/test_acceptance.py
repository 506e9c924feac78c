"""Acceptance statistics, counted by hand."""

import pytest

from eagle3_pipeline.evaluation.acceptance import Acceptance, first_difference, from_counters, pool

# Accepted tokens of eight draft steps of three tokens: 3, 0, 1, 3, 2, 0, 1, 1.
# At least 1: six steps; at least 2: three; all 3: two.
TRACE = Acceptance(8, (6, 3, 2))


def test_the_acceptance_length_counts_the_bonus_token() -> None:
    assert TRACE.accepted_per_draft == (3 + 0 + 1 + 3 + 2 + 0 + 1 + 1) / 8 == 11 / 8
    assert TRACE.acceptance_length == 1 + 11 / 8


def test_rates_are_shares_of_all_steps_and_conditional_ones_of_those_that_got_there() -> None:
    assert TRACE.rates() == [6 / 8, 3 / 8, 2 / 8]
    assert TRACE.conditional_rates() == [6 / 8, 3 / 6, 2 / 3]


def test_the_acceptance_length_is_one_plus_the_sum_of_the_rates() -> None:
    assert TRACE.acceptance_length == pytest.approx(1 + sum(TRACE.rates()))


def test_no_draft_step_gives_the_bonus_token_only() -> None:
    nothing = Acceptance(0, (0, 0))
    assert (nothing.acceptance_length, nothing.rates(), nothing.conditional_rates()) == (1.0, [0.0, 0.0], [0.0, 0.0])
    assert Acceptance(5, (0, 0)).conditional_rates() == [0.0, 0.0]


def test_pooling_is_no_mean_of_means() -> None:
    few, many = Acceptance(2, (2, 2)), Acceptance(98, (49, 0))
    pooled = pool([few, many])
    assert pooled == Acceptance(100, (51, 2))
    assert pooled.acceptance_length == 1.53
    assert (few.acceptance_length + many.acceptance_length) / 2 == 2.25
    assert pool([]) == Acceptance(0, ())


def test_counters_are_differences() -> None:
    before = {"num_drafts": 10, "accepted_per_position": [5, 2, 1], "num_draft_tokens": 30}
    after = {"num_drafts": 18, "accepted_per_position": [11, 5, 3], "num_draft_tokens": 54}
    assert from_counters(before, after, 3) == TRACE
    assert from_counters({}, {"num_drafts": 8, "accepted_per_position": [6, 3, 2]}, 3) == TRACE
    assert from_counters(after, after, 3) == Acceptance(0, (0, 0, 0))
    assert from_counters({}, {}, 3) == Acceptance(0, (0, 0, 0))


def test_counters_of_another_depth_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        from_counters({}, {"num_drafts": 1, "accepted_per_position": [1, 1]}, 3)


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([9], [1], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2], 2),
        ([], [4], 0),
    ],
)
def test_the_first_difference_of_two_answers(left: list[int], right: list[int], position: int | None) -> None:
    assert first_difference(left, right) == position
