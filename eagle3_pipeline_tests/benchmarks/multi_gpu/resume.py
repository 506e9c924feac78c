"""Training on all GPUs, what is no matter of speed: kill and resume, the memory of the largest draft."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from eagle3_pipeline.stages.draft_checkpoint import TORCHRUN, WORKER
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import DraftSize
from eagle3_pipeline_tests.benchmarks.multi_gpu.training import Training


class _EnoughError(Exception):
    """All that is measured of a run has been seen."""


class Resume(Training):
    """The part `resume`; its runs share the GPUs. Arguments are those of `Training`."""

    def run(self) -> None:
        """Writes the data and trains."""
        sizes = self.sizes
        data = self._prepare({"small": sizes.small_draft, "large": sizes.large_draft})
        if data:
            self.report.step("three trainings", 1.5 * sizes.train_s, lambda: self._together(data))

    def _together(self, data: dict[str, Any]) -> None:
        """Runs that share the GPUs: one that is killed and goes on, the same uninterrupted, the largest draft."""
        size = self.sizes.small_draft
        specs = {name: self._job("small", size, data["small"], f"small-{name}") for name in ("whole", "cut")}
        work = {
            "a training": lambda: self._train(specs["whole"], self.num),
            "kill and resume": lambda: self._kill(specs["cut"]),
            "the largest draft": lambda: self._large(data["large"]),
        }
        at_once = len(work) if self.report.num_gpus else 1
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(lambda name: self.report.step(name, 0, work[name]), work))
        # Kernels of a GPU do not add in the same order every time.
        exact = not self.report.num_gpus
        self._compare("killed and resumed, uninterrupted", self.home / "small-cut", self.home / "small-whole", exact)

    def _kill(self, spec: dict[str, Any]) -> None:
        """SIGKILL of the last rank ends all; the run goes on from its state as if nothing had happened."""
        spec["resume_every_s"] = 0
        path = self.home / "cut.json"
        path.write_text(json.dumps(spec))
        with self._lease(spec["output"], self.num) as lease:
            self._killed(path, {**os.environ, **lease.environment()})
        told: list[str] = []
        self._train(spec, self.num, lambda event: told.append(str(event.get("message"))))
        resumed = [line for line in told if line.startswith("resumed at")]
        self.report.check("the second run resumes", len(resumed) == 1, resumed)

    def _killed(self, path: Path, environment: dict[str, str]) -> None:
        state = self.home / "small-cut" / "resume" / "state.pt"
        command = [sys.executable, "-m", TORCHRUN, str(self.num), str(path)]
        with (self.home / "killed.log").open("w") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        while not state.exists() and run.poll() is None:
            time.sleep(0.02)
        ranks = [p for p in psutil.Process(run.pid).children(recursive=True) if WORKER in p.cmdline()]
        ranks = sorted(ranks, key=lambda rank: int(rank.environ()["RANK"]))
        os.kill(ranks[-1].pid, signal.SIGKILL)
        code = run.wait(90)
        _, alive = psutil.wait_procs(ranks, 30)
        self.report.check("a killed rank ends all of them", code != 0 and not alive, f"exit code {code}, left {alive}")

    def _large(self, data: dict[str, Any]) -> None:
        """Two steps of the largest draft: what they take of each GPU."""
        size, started = self.sizes.large_draft, time.monotonic()
        spec = self._job("large", size, data, "large")
        told: list[dict[str, Any]] = []

        def on_event(event: dict[str, Any]) -> None:
            told.append(event)
            if event["event"] == "epoch" and event["epoch"] == 1:
                # What follows writes the checkpoint: minutes of disk.
                raise _EnoughError

        with suppress(_EnoughError):
            self._train(spec, self.num, on_event)
        self.report.row("largest draft", f"{size.steps} steps, set-up included", time.monotonic() - started, "s")
        self.report.row("largest draft", "trainable parameters", _trained_parameters(size) / 1e6, "M")
        last = told[-1]
        self.report.check("the largest draft takes its steps", last.get("step") == size.steps, last)
        self.report.row("largest draft", "peak of rank 0", last.get("peak_memory_bytes", 0) / 2**30, "GiB")


def _trained_parameters(size: DraftSize) -> int:
    """fc, one decoder layer on twice the hidden size, norms aside, and the output layer."""
    shape = size.verifier
    attention = shape.head_dim * shape.hidden * (2 * (shape.heads + 2 * shape.kv_heads) + shape.heads)
    mlp = 3 * shape.hidden * shape.inner
    return 3 * shape.hidden * shape.hidden + attention + mlp + size.draft_vocab * shape.hidden
