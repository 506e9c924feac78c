"""`python -m ...speculators_on_cpu ARGUMENTS`: what `speculators train ARGUMENTS` runs, on a CPU, for a rehearsal only.

The command knows accelerators only: it moves batches to an index, and waits for a device.
"""

import sys

import torch
from speculators.train import trainer
from speculators.train.cli import main
from speculators.train.config import TrainConfig

# Given last, these replace what compiles on a GPU only.
_INSTEAD = ["--draft-attn-impl", "sdpa", "--loss-implementation", "eager"]


class _CpuTrainer(trainer.Trainer):
    def setup_trainer(self) -> None:
        super().setup_trainer()
        self.device_type = "cpu"
        self.local_rank = torch.device("cpu")


if __name__ == "__main__":
    torch.accelerator.synchronize = lambda *_: None
    sys.modules[main.__module__].Trainer = _CpuTrainer  # type: ignore[attr-defined]
    main(TrainConfig.resolve([*sys.argv[1:], *_INSTEAD]))
