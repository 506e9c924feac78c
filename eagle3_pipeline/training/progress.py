"""Where a training run is, and what one optimizer step works on."""

import math
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad

from eagle3_pipeline.training.dataset import Batch
from eagle3_pipeline.training.prefetch import Fetched, Moving


@dataclass
class Progress:
    """Where a run is: the next epoch and batch, what it counted, and the best epoch so far (0: none)."""

    epoch: int = 1
    batch: int = 0
    batches: int = 0
    step: int = 0
    loss_sum: float = 0.0
    loss_tokens: int = 0
    tokens: int = 0
    train_s: float = 0.0
    wait_s: float = 0.0
    best_epoch: int = 0
    # Metrics of epoch 0 (before the first step) and of each finished epoch.
    history: list[dict[str, float]] = field(default_factory=list)


def supervised_mask(batch: Batch, ttt_steps: int) -> torch.Tensor:
    """The loss mask [1, S] for training.

    At TTT step i speculators pairs the target at position p with the logits of position p-i of the packed row. For the
    first i positions of a sequence those belong to the sequence packed before it, so positions below `ttt_steps` - 1
    are not supervised; in a chat they are template tokens anyway.
    """
    return batch["loss_mask"].bool() & (batch["position_ids"] >= ttt_steps)


def only_supervised(batch: Batch, ttt_steps: int, multiple: int) -> Batch:
    """The batch with the positions that have a target that counts: no output layer is computed for others.

    Args:
        batch: on the CPU, where it does not wait for a device.
        ttt_steps: as in `supervised_mask`.
        multiple: of this number are the positions, so that few sizes of memory are asked for; the rest weighs 0.

    Returns:
        The batch, its `loss_mask` that of training, with `targets`, int64 [n], and their `weights`, float32 [n].
    """
    mask = supervised_mask(batch, ttt_steps)
    positions = mask[0].nonzero()[:, 0]
    missing = max(math.ceil(len(positions) / multiple), 1) * multiple - len(positions)
    return {
        **batch,
        "loss_mask": mask,
        "targets": pad(positions, (0, missing)),
        "weights": pad(torch.ones(len(positions)), (0, missing)),
    }


def with_all_targets(batch: Batch, mask: torch.Tensor) -> Batch:
    """As `only_supervised` with this mask [1, S], but with every position: those beside the mask weigh 0."""
    positions = torch.arange(mask.shape[1], device=mask.device)
    return {**batch, "loss_mask": mask, "targets": positions, "weights": mask[0].float()}


@dataclass(frozen=True)
class Group:
    """The batches of one optimizer step.

    Attributes:
        num_batches: of all ranks.
        num_supervised: targets that count, of all ranks.
        num_positions: positions that are not padding, of all ranks.
        numbers: which of the step's batches this rank has.
        supervised: targets that count in each of these.
        batches: these, on the CPU, or moving to the device.
        started: when waiting for them began, of `time.monotonic`.
    """

    num_batches: int
    num_supervised: int
    num_positions: int
    numbers: list[int]
    supervised: list[int]
    batches: list[Batch | Moving]
    started: float


@dataclass(frozen=True)
class Taken:
    """An optimizer step that was taken, or is being taken on the device.

    Attributes:
        step: its number.
        epoch: its epoch.
        num_supervised: targets that counted, of all ranks.
        rate: the learning rate.
        results: losses, and the norm of the gradients.
    """

    step: int
    epoch: int
    num_supervised: int
    rate: float
    results: Fetched
