"""Counting of acceptance on cases small enough to count on paper."""

import pytest
import torch

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.acceptance import AcceptanceMeter


def batch(mask: list[int], documents: list[int]) -> dict[str, torch.Tensor]:
    return {"loss_mask": torch.tensor([mask]).bool(), "document_ids": torch.tensor([documents])}


def test_counts_of_one_sequence() -> None:
    # Position:            0  1  2  3  4  5
    # predicts trained:    0  1  1  1  1  1   so drafts start at 2..5
    choice = torch.tensor([9, 1, 2, 3, 4, 5])
    drafts = [
        torch.tensor([[0, 0, 2, 3, 0, 5]]),  # step 0 at 2, 3, 4, 5: right, right, wrong, right
        torch.tensor([[0, 0, 3, 0, 5, 7]]),  # step 1 at 2, 3, 4: right, wrong, right after a wrong one
        torch.tensor([[0, 0, 4, 5, 0, 0]]),  # step 2 at 2, 3: right, right after a wrong one
    ]
    meter = AcceptanceMeter(3)
    meter.add(drafts, choice, batch([0, 1, 1, 1, 1, 1], [0] * 6))
    assert meter.num_positions == 4
    assert meter.result()["full_acc"] == [3 / 4, 1 / 3, 1 / 2]
    assert meter.result()["conditional_acc"] == [3 / 4, 1 / 2, 1]
    assert meter.acceptance_length == pytest.approx(1 + 3 / 4 + 1 / 3 + 1 / 2)


def test_sequences_of_a_pack_do_not_mix() -> None:
    choice = torch.tensor([1, 1, 1, 1, 1, 1])
    ones = torch.ones(1, 6, dtype=torch.long)
    meter = AcceptanceMeter(2)
    meter.add([ones, ones], choice, batch([1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, -1]))
    # Starts: 1, 2 of the first and 4 of the second sequence; only start 1 has a second target in its own.
    assert meter.num_positions == 3
    assert meter.result() == {"full_acc": [1, 1], "conditional_acc": [1, 1]}
    assert meter._counts.tolist() == [[3, 1], [3, 1], [3, 1]]


def test_an_unknown_token_is_never_right_and_ends_a_run() -> None:
    choice = torch.tensor([0, 1, -1, 1, 1])
    drafts = [torch.tensor([[0, 1, -1, 1, 1]]), torch.tensor([[1, -1, 1, 1, 0]])]
    meter = AcceptanceMeter(2)
    meter.add(drafts, choice, batch([1, 1, 1, 1, 1], [0] * 5))
    assert meter.outside_draft_vocab_share == 1 / 4
    assert meter.result()["full_acc"] == [3 / 4, 1 / 3]


def test_serving_drafts_behind_what_it_accepted() -> None:
    # Position:          0  1  2  3  4  5  6  7  8   drafts may start at 1..8
    right = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0, 1]])
    also = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 0, 0]])
    meter = AcceptanceMeter(2)
    meter.add([right, also], torch.ones(9, dtype=torch.long), batch([1] * 9, [0] * 9))
    # Of all: 5 of 8 at the first step, 3 of 7 at the second.
    assert meter.acceptance_length == pytest.approx(1 + 5 / 8 + 3 / 7)
    # Served: two tokens are accepted at 1, next 4: one, next 6: none, 7: none, 8: one, at the end.
    assert meter.served_acceptance_length == pytest.approx(1 + 3 / 5 + 1 / 4)


def test_a_new_sequence_of_a_pack_is_drafted_from_its_beginning() -> None:
    ones = torch.ones(1, 7, dtype=torch.long)
    meter = AcceptanceMeter(2)
    meter.add([ones, ones], ones[0], batch([1] * 7, [0, 0, 0, 1, 1, 1, 1]))
    # First sequence: at 1, both tokens up to its end. Second: at 4 two, then behind its end.
    assert meter._served_counts.tolist() == [[2, 2], [2, 2]]


def test_batches_add_up() -> None:
    choice, drafts = torch.tensor([1, 1, 1]), [torch.tensor([[1, 1, 0]])]
    meter = AcceptanceMeter(1)
    for _ in range(2):
        meter.add(drafts, choice, batch([1, 1, 1], [0] * 3))
    assert meter.num_positions == 4
    assert meter.result()["full_acc"] == [1 / 2]


def test_nothing_to_measure() -> None:
    meter = AcceptanceMeter(1)
    meter.add([torch.ones(1, 3)], torch.tensor([1, 1, 1]), batch([0, 0, 1], [0] * 3))
    with pytest.raises(TrainingError, match="no position to measure acceptance on"):
        meter.result()
