"""`python -m ...training_worker SPEC.json`: this project's training, one epoch of it, then some steps part by part.

The trainer is the product's, and so is the loop of the first epoch; left out is what follows an epoch (validation,
checkpoints). Steps of the second epoch wait for the device after each part, so their sum is more than a step of the
first takes.
"""

import itertools
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import Trainer
from eagle3_pipeline.training.prepare import Emit, peak_memory_bytes
from eagle3_pipeline.training.probe import probe_step
from eagle3_pipeline.training.progress import Group, Progress
from eagle3_pipeline.workers import claim_stdout, emit

# Steps of the second epoch before those that are measured: its first batches are not read ahead.
_FIRST = 3
_PROFILED = 3


class MeasuredTrainer(Trainer):
    """The trainer with a clock.

    Args:
        job: two epochs.
        emit: takes the trainer's events.
        after: optimizer steps before the measured ones.
    """

    def __init__(self, job: Job, emit: Emit, after: int) -> None:
        self._after, self._began = after, Progress()
        self._parts: dict[str, float] | None = None
        self._marked = 0.0
        super().__init__(job, emit)

    def measure(self, split_steps: int) -> dict[str, Any]:
        """Trains; what the steady steps took."""
        probe_step(self)
        self._validate(0)
        self._train_epoch()
        done, began = self.progress, self._began
        seconds = done.train_s - began.train_s
        found = {
            "tokens_a_step": done.tokens / done.step,
            "steps": done.step,
            "tokens_per_s": (done.tokens - began.tokens) / seconds,
            "data_wait_share": (done.wait_s - began.wait_s) / seconds,
            "peak_memory_bytes": float(peak_memory_bytes(self.device)),
            # What the probe took.
            "forward": next(name for name, forward in self.forwards.items() if forward is self.forward),
        }
        found["split"] = self._split_steps(split_steps)
        self._profile()
        return found

    def _split_steps(self, count: int) -> dict[str, float]:
        """Milliseconds of each part of a step."""
        self.model.train()
        for number, group in enumerate(itertools.islice(self._groups(), _FIRST + count)):
            self._step(group)
            if number == _FIRST - 1:
                self._parts = {}
                self._mark("")
        parts, self._parts = self._parts or {}, None
        return {name: 1000 * seconds / count for name, seconds in parts.items() if name}

    def _profile(self) -> None:
        """Writes what takes the time of a few steps, to a file that the benchmark keeps."""
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        groups = itertools.islice(self._groups(), _FIRST + _PROFILED)
        for group in itertools.islice(groups, _FIRST):
            self._step(group)
        with profile(activities=activities) as profiler:
            for group in groups:
                self._step(group)
            if on_gpu:
                torch.cuda.synchronize()
        kernels = sum(event.device_type == DeviceType.CUDA for event in profiler.events())
        averages = profiler.key_averages()
        orders = ["self_cuda_time_total"] * on_gpu + ["self_cpu_time_total", "cpu_time_total"]
        tables = [averages.table(sort_by=order, row_limit=25, max_name_column_width=90) for order in orders]
        told = f"{_PROFILED} steps, {kernels / _PROFILED:.0f} kernels and copies a step"
        (self.job.output / "profile.log").write_text("\n\n".join([told, *tables]))

    def _mark(self, part: str) -> None:
        """What passed since the last mark was this part of a step."""
        if self._parts is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.monotonic()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._marked
        self._marked = now

    def _step(self, group: Group) -> None:
        self._mark("waiting for data")
        done = self.progress
        if done.step == self._after:
            self._began = Progress(tokens=done.tokens, train_s=done.train_s, wait_s=done.wait_s)
        super()._step(group)
        self._mark("fetching losses")

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """As the trainer's, and a mark on each side."""
        self._mark("to the device, noise")
        found = super().loss(batch)
        self._mark("forward")
        return found

    def _update(self) -> tuple[torch.Tensor, float]:
        self._mark("backward")
        found = super()._update()
        self._mark("optimizer")
        return found

    def _validate(self, epoch: int, train_loss: float | None = None) -> None:
        if epoch == 0:
            super()._validate(epoch, train_loss)

    def _save(self) -> None: ...


def main(path: Path) -> None:
    """Runs the job of a spec file."""
    send = partial(emit, claim_stdout())
    spec = json.loads(path.read_text())
    trainer = MeasuredTrainer(Job.parse(spec), send, spec["after"])
    send("result", **trainer.measure(spec["split_steps"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
