"""The probe before the first epoch: what would fail at the longest batch fails now."""

import traceback
from typing import TYPE_CHECKING

import torch

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.dataset import Batch
from eagle3_pipeline.training.prefetch import DEPTH
from eagle3_pipeline.training.prepare import peak_memory_bytes
from eagle3_pipeline.training.progress import with_all_targets

if TYPE_CHECKING:
    from eagle3_pipeline.training.loop import Trainer


def probe_step(trainer: "Trainer") -> None:
    """One step on the batch with the most tokens, before anything is paid for: does it fit, and what works?

    Raises:
        TrainingError: it does not fit the memory; the message names the settings to lower.
    """
    sizes = trainer.train_set.num_positions
    largest = max(trainer.batches.of_epoch(1), key=lambda batch: int(sizes[batch].sum()))
    batch = trainer.bench.to_device(trainer.train_loader.collate_fn([trainer.train_set[i] for i in largest]))
    # Another batch may have more targets.
    batch = with_all_targets(batch, batch["position_ids"] >= trainer.spec.ttt_steps)
    num_tokens = int(sizes[largest].sum())
    try:
        _choose_forward(trainer, batch)
        _require_memory(trainer, DEPTH * sum(value.nbytes for value in batch.values()))
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise TrainingError(
            f"one training step on the largest packed batch ({num_tokens:,} tokens) does not fit the memory of "
            f"{trainer.device}: {str(error).splitlines()[0]}; lower training.batch_tokens (now "
            f"{trainer.spec.batch_tokens:,}, at least the longest sequence) or training.ttt_steps"
        ) from error
    for optimizer in trainer.optimizers:
        optimizer.zero_grad()
    peak = peak_memory_bytes(trainer.device) / 2**30
    trainer.emit("log", message=f"a step on the largest batch ({num_tokens:,} tokens) fits: peak memory {peak:.1f} GiB")


def _choose_forward(trainer: "Trainer", batch: Batch) -> None:
    """Takes the first way to the loss that works here: some need a compiler for the GPU."""
    *others, last = trainer.forwards
    for name in others:
        trainer.forward = trainer.forwards[name]
        try:
            trainer.loss(batch)[0].backward()
            return
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever the compiler raises
            traceback.print_exc()
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            trainer.emit("log", message=f"{name} does not work here ({reason})")
    trainer.forward = trainer.forwards[last]
    trainer.loss(batch)[0].backward()


def _require_memory(trainer: "Trainer", ahead: int) -> None:
    """The first step adds the optimizers' moments, at most two float32 values a parameter, and the batches ahead."""
    if trainer.device.type != "cuda":
        return
    needed = ahead + 8 * sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    reserved = torch.cuda.memory_reserved(trainer.device) - torch.cuda.memory_allocated(trainer.device)
    free = torch.cuda.mem_get_info(trainer.device)[0] + reserved
    if needed > free:
        raise MemoryError(f"optimizer and batches need {needed:,} bytes more, {free:,} are free")
