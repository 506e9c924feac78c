"""Membership of the validation split depends on a conversation's id only, and only ever shrinks."""

import random

import pytest

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.split import conversation_position, validation_conversations


def test_position_is_pinned() -> None:
    # sha256("a") starts with ca978112ca1bbdca, which is 0.7913742... of 2**64.
    assert conversation_position("a") == pytest.approx(0x_CA97_8112_CA1B_BDCA / 2**64, abs=1e-15)


def test_growing_data_never_moves_a_conversation_across() -> None:
    ids = [f"conversation-{i}" for i in range(1000)]
    small = validation_conversations(ids[:400], 0.05, 8)
    large = validation_conversations(random.Random(0).sample(ids, 1000), 0.05, 8)
    assert small == large & set(ids[:400])
    assert 30 <= len(large) <= 70


def test_small_sets_hold_out_the_lowest_and_only_give_back() -> None:
    ids = [f"conversation-{i}" for i in range(40)]
    lowest = sorted(ids, key=conversation_position)[:8]
    assert validation_conversations(ids, 0.05, 8) == set(lowest)
    seen_in_training: set[str] = set()
    for size in range(9, 41):
        held_out = validation_conversations(ids[:size], 0.05, 8)
        assert len(held_out) >= 8
        assert not held_out & seen_in_training
        seen_in_training |= set(ids[:size]) - held_out


def test_repeated_ids_count_once() -> None:
    with pytest.raises(TrainingError, match=r"3 conversations are too few: .*min_validation_samples holds out 3"):
        validation_conversations(["a", "b", "c"] * 5, 0.05, 3)


def test_nothing_left_to_train_on() -> None:
    with pytest.raises(TrainingError, match=r"validation_fraction 0.999\d* holds out all 4 conversations"):
        validation_conversations(["a", "b", "c", "d"], 0.9999999, 1)
