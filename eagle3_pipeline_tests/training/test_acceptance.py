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
