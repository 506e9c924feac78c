"""Optimizers and the learning-rate schedule, which is a function of the step and so needs no state."""

import math
from types import SimpleNamespace

import torch
from speculators.train.optimizers import build_optimizers

from eagle3_pipeline.config import TrainingSpec


def make_optimizers(model: torch.nn.Module, spec: TrainingSpec) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon for matrices with AdamW for the rest."""
    settings = SimpleNamespace(
        optimizer=spec.optimizer,
        lr=spec.lr,
        weight_decay=spec.weight_decay,
        muon_lr=spec.lr,
        muon_momentum=0.95,
        muon_weight_decay=spec.weight_decay,
        muon_ns_steps=5,
        # Scales Muon's updates to the size of AdamW's, so that one learning rate fits both.
        muon_adjust_lr_fn="match_rms_adamw",
    )
    optimizers = build_optimizers(model, settings)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(optimizer, torch.optim.AdamW) and group["params"][0].is_cuda:
                # One kernel reads and writes weights and moments once.
                group["fused"] = True
    return optimizers


def learning_rate(spec: TrainingSpec, step: int, total_steps: int) -> float:
    """Learning rate of a step: linear warm-up, then cosine or linear decay to zero, or constant.

    Args:
        spec: peak rate, warm-up share and schedule.
        step: optimizer steps taken before this one.
        total_steps: optimizer steps of the whole run.
    """
    warmup = math.ceil(spec.warmup_ratio * total_steps)
    if step < warmup:
        return spec.lr * (step + 1) / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    if spec.scheduler == "cosine":
        return spec.lr * 0.5 * (1 + math.cos(math.pi * done))
    return spec.lr * (1 - done) if spec.scheduler == "linear" else spec.lr


def set_learning_rate(optimizers: list[torch.optim.Optimizer], rate: float) -> None:
    """Sets the rate of every parameter group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
