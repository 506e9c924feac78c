"""Training on one process and on as many as there are GPUs: equal losses, speed, kill and resume, the largest draft."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from eagle3_pipeline.engine.lease import Lease
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.stages.draft_checkpoint import TORCHRUN, WORKER
from eagle3_pipeline.workers import run_worker
from eagle3_pipeline_tests.benchmarks.multi_gpu import weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import DraftSize, Sizes
from eagle3_pipeline_tests.benchmarks.multi_gpu.training_data import full_batches, job, write_data

# The first step sees equal weights; later ones carry along what adding in another order and bf16 make of them.
_TOLERANCES = {"loss": (1e-3, 1e-2), "grad_norm": (5e-3, 3e-2), "lr": (1e-9, 1e-9)}


class _EnoughError(Exception):
    """All that is measured of a run has been seen."""


class Training:
    """The part `training`.

    Args:
        report: takes rows and checks.
        sizes: of drafts and data.
        home: folder of leases, data and checkpoints.
        pool_gpus: processes of the larger runs; GPUs of the pool if there are any.
    """

    def __init__(self, report: Report, sizes: Sizes, home: Path, pool_gpus: int) -> None:
        self.report, self.sizes, self.home, self.num = report, sizes, home, pool_gpus

    def run(self) -> None:
        """All steps, the most telling first."""
        needs_s, step = self.sizes.train_s, self.report.step
        names = {"draft": self.sizes.draft, "small": self.sizes.small_draft, "large": self.sizes.large_draft}
        writing = [weights.start(self.home / name, size.verifier, head_only=True) for name, size in names.items()]
        data = step("writing the data", 20, lambda: {name: self._write(name, size) for name, size in names.items()})
        if any(process.wait() for process in writing) or not data:
            self.report.check("verifiers and data are written", False)
            return
        step("one process and all", 2 * needs_s, lambda: self._parity(data["draft"]))
        step("what is no matter of speed", 1.5 * needs_s, lambda: self._together(data))

    def _write(self, name: str, size: DraftSize) -> dict[str, Any]:
        num_batches = size.steps * size.batches_a_rank * self.num
        return write_data(self.home / f"{name}-data", size, full_batches(size, num_batches))

    def _job(self, name: str, size: DraftSize, data: dict[str, Any], output: str, **training: Any) -> dict[str, Any]:
        if not self.report.num_gpus:
            training |= {"device": "cpu", "num_threads": 1}
        return job(self.home / name, size, data, self.home / output, self.num, **training)

    def _train(
        self, spec: dict[str, Any], world: int, on_event: Callable[[dict[str, Any]], None] | None = None
    ) -> dict[str, Any]:
        """Under a lease, as the stage does it."""
        launcher = (TORCHRUN, str(world)) if world > 1 else ()
        folder = Path(spec["output"]).with_suffix(".run")
        with self._lease(spec["output"], world) as lease:
            tell = on_event or (lambda _event: None)
            return run_worker(WORKER, spec, folder, tell, TrainingError, "training", lease.environment(), launcher)[
                "metrics"
            ]

    def _lease(self, output: str, world: int) -> AbstractContextManager[Lease]:
        # A pool of its own for each run: some share the GPUs.
        manager = EngineManager(self.home / f"pool-{Path(output).name}", self.num)
        return manager.lease(world, "training", 60.0, self.report.log, "none")

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

    def _parity(self, data: dict[str, Any]) -> None:
        """The same global batches on one process and on all."""
        size, found = self.sizes.draft, {}
        for world in (self.num, 1):
            output = f"draft-{world}"
            found[world] = self._train(self._job("draft", size, data, output), world)
            told = f"{world} process{'es' if world > 1 else ''}"
            self.report.row("training", f"{told}: tokens/s", found[world]["tokens_per_s"], "tokens/s")
            self.report.row("training", f"{told}: peak of rank 0", found[world]["peak_memory_bytes"] / 2**30, "GiB")
            self.report.row("training", f"{told}: waits for data", 100 * found[world]["data_wait_share"], "%")
        self.report.row("training", "trainable parameters", found[1]["trainable_parameters"] / 1e6, "M")
        efficiency = 100 * found[self.num]["tokens_per_s"] / (self.num * found[1]["tokens_per_s"])
        self.report.row("training", f"scaling efficiency of {self.num} processes", efficiency, "%")
        steps = found[1]["steps"], found[self.num]["steps"]
        self.report.check("one process and all take the same steps", steps == (size.steps, size.steps), steps)
        one, many = (self.home / f"draft-{world}" for world in (1, self.num))
        self._compare("one process and all", many, one)

    def _compare(self, what: str, found: Path, expected: Path, exact: bool = False) -> None:
        for name, (first, later) in _TOLERANCES.items():
            ours, theirs = _steps(found, name), _steps(expected, name)
            errors = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=False)]
            same = len(ours) == len(theirs) > 0
            passed = same and errors[0] <= (0 if exact else first) and max(errors) <= (0 if exact else later)
            self.report.check(
                f"{what}: {name} of each step", passed, f"largest difference {max(errors, default=1):.2e}"
            )

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


def _steps(output: Path, name: str) -> list[float]:
    rows = pq.read_table(output / "metrics.parquet").to_pylist()
    return [row["value"] for row in rows if (row["kind"], row["name"]) == ("step", name)]


def _trained_parameters(size: DraftSize) -> int:
    """fc, one decoder layer on twice the hidden size, norms aside, and the output layer."""
    shape = size.verifier
    attention = shape.head_dim * shape.hidden * (2 * (shape.heads + 2 * shape.kv_heads) + shape.heads)
    mlp = 3 * shape.hidden * shape.inner
    return 3 * shape.hidden * shape.hidden + attention + mlp + size.draft_vocab * shape.hidden
