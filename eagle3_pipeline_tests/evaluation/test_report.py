"""What a report warns of: served and simulated that do not agree, too little data; and its tables."""

import pytest

from eagle3_pipeline.evaluation.report import agrees, batch_table, data_scale_notes


@pytest.mark.parametrize(
    ("served", "simulated", "num_drafts", "expected"),
    [
        # A tenth is allowed, and three standard deviations: sqrt(1.0 / 10,000) x 3 = 0.03.
        (0.88, 1.0, 10_000, True),
        (0.86, 1.0, 10_000, False),
        (1.12, 1.0, 10_000, True),
        (1.14, 1.0, 10_000, False),
        # Few steps allow more: sqrt(1.0 / 100) x 3 = 0.3.
        (0.65, 1.0, 100, True),
        (0.55, 1.0, 100, False),
        # The demo's own numbers.
        (0.276, 0.291, 998, True),
        # A draft that is served wrongly.
        (0.02, 0.291, 998, False),
        # Nothing accepted and nothing expected.
        (0.0, 0.0, 500, True),
    ],
)
def test_served_and_simulated_agree_within_tolerance_and_chance(
    served: float, simulated: float, num_drafts: int, expected: bool
) -> None:
    assert agrees(served, simulated, num_drafts, 0.1) is expected


def test_fewer_tokens_than_parameters_are_a_warning_with_both_numbers() -> None:
    training = {"supervised_tokens_train": 10_000.0, "trainable_parameters": 5_000_000.0, "sequences_train": 243.0}
    (note,) = data_scale_notes(training)
    assert "10,000 supervised tokens in 243 sequences for 5,000,000 trained parameters" in note
    assert data_scale_notes({**training, "supervised_tokens_train": 5e6}) == []
    assert data_scale_notes({}) == []


def test_batches_are_a_table_of_their_own_and_none_is_none() -> None:
    row = {"batch_size": 8, "tokens_per_s": 90.0, "baseline_tokens_per_s": 60.0, "speed_up": 1.5}
    assert batch_table([row]).splitlines()[-1].replace(" ", "") == "|8|90.0|60.0|1.50|"
    assert batch_table([]) == ""
