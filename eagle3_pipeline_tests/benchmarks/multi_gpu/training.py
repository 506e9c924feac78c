"""Training on one process and on as many as there are GPUs: equal losses, speed."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

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


class Training:
    """The part `training`: the same global batches on one process and on all.

    Args:
        report: takes rows and checks.
        sizes: of drafts and data.
        home: folder of leases, data and checkpoints.
        pool_gpus: processes of the larger runs; GPUs of the pool if there are any.
    """

    def __init__(self, report: Report, sizes: Sizes, home: Path, pool_gpus: int) -> None:
        self.report, self.sizes, self.home, self.num = report, sizes, home, pool_gpus

    def run(self) -> None:
        """Writes the data and trains."""
        data = self._prepare({"draft": self.sizes.draft})
        if data:
            self.report.step("one process and all", 2 * self.sizes.train_s, lambda: self._parity(data["draft"]))

    def _prepare(self, sizes: dict[str, DraftSize]) -> dict[str, Any]:
        """Writes a verifier and data for each draft; the fields of a training worker's spec that name the data.

        Nothing, if there is no time for it.
        """
        writing = [weights.start(self.home / name, size.verifier, head_only=True) for name, size in sizes.items()]
        data = self.report.step("writing the data", 20, lambda: {n: self._write(n, size) for n, size in sizes.items()})
        if any([process.wait() for process in writing]):
            raise RuntimeError("the verifiers were not written")
        return data or {}

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


def _steps(output: Path, name: str) -> list[float]:
    rows = pq.read_table(output / "metrics.parquet").to_pylist()
    return [row["value"] for row in rows if (row["kind"], row["name"]) == ("step", name)]
