"""Training: this project against `speculators train`, on the same sequences, in steps of the same number of tokens.

Both sides compile and have the GPU to themselves. A side's clock is read in this process, whenever a line of progress
comes out of the training process: after the same two optimizer steps on both sides, the first of which is behind what
compiles and warms up. Tokens are positions that are trained on, padding is none: the mean of a step of the epoch, times
the steps between the two lines. (A sequence has one position more or less, and another place in the order of batches.)

This project tells of every step, when the device has finished the step before; speculators does so every few steps,
where its line comes after a wait for the device, and in between it does not wait. The parts of a step come from steps
of their own on this side (`training_worker`), and from what the command tells of those few steps on the other: `bwd_ms`
holds `clip_ms`, and `fetch_ms` what the device still had to do, so it is the most that waiting for data can be.

The work compared is speculators': its output layer stays the verifier's, and it adds no noise to states. A last run is
this project's defaults: the output layer is trained too, and noise added.
"""

import re
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.workers import run_worker
from eagle3_pipeline_tests.benchmarks.multi_gpu import weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.multi_gpu.training_data import NUM_VALIDATION, job, write_data
from eagle3_pipeline_tests.benchmarks.one_gpu import sizes as all_sizes
from eagle3_pipeline_tests.benchmarks.one_gpu import speculators_train
from eagle3_pipeline_tests.benchmarks.one_gpu.speculators_train import OfflineData

_WORKER = "eagle3_pipeline_tests.benchmarks.one_gpu.training_worker"
OURS, THEIRS, DEFAULTS = "this project", "speculators train", "this project, its defaults"
_EQUAL = {"train_lm_head": False, "noise": {"kind": "none"}}
_PARTS = ("fetch_ms", "h2d_ms", "fwd_ms", "bwd_ms", "clip_ms", "opt_ms")


class Training:
    """The part `training`.

    Args:
        report: takes rows and checks.
        sizes: of drafts and data.
        home: folder of leases, data and checkpoints.
        num_gpus: 1; 0: a rehearsal.
    """

    def __init__(self, report: Report, sizes: all_sizes.Sizes, home: Path, num_gpus: int) -> None:
        self.report, self.sizes, self.home, self.num_gpus = report, sizes, home, num_gpus
        self.manager = EngineManager(home, max(num_gpus, 1))
        self._data: dict[str, tuple[dict[str, Any], OfflineData]] = {}
        self._speeds: dict[tuple[str, str], float] = {}

    def run(self) -> None:
        """The most telling first."""
        step, start = self.report.step, self.sizes.train_start_s
        loads = self.sizes.trainings
        writing = [weights.start(self.home / load.name, load.draft.verifier, head_only=True) for load in loads]
        try:
            for load in loads:
                step(f"{load.name}: data", 30, partial(self._write, load))
            if any([process.wait(120) for process in writing]):
                raise RuntimeError("the verifiers were not written")
            written = [load for load in loads if load.name in self._data]
            for load in written:
                step(f"{load.name}: {OURS}", start, partial(self._ours, load, OURS, _EQUAL))
                step(f"{load.name}: {THEIRS}", start, partial(self._theirs, load))
                self._compare(load)
            for load in written:
                step(f"{load.name}: {DEFAULTS}", start, partial(self._ours, load, DEFAULTS, {}))
        finally:
            for process in writing:
                process.kill()

    def _write(self, load: all_sizes.Training) -> None:
        """Sequences for so many steps, and those that validate."""
        draw = np.random.default_rng(0)
        mean = (load.shortest + load.longest) / 2
        count = int(load.draft.steps * load.draft.batch_tokens / mean) + 1 + NUM_VALIDATION
        lengths = draw.integers(load.shortest, load.longest + 1, count).tolist()
        theirs = OfflineData(self.home / f"{load.name} speculators data")
        ours = write_data(self.home / f"{load.name} data", load.draft, lengths, theirs.add)
        theirs.finish(Path(ours["vocab_map"]), load.draft.draft_vocab)
        self._data[load.name] = ours, theirs

    def _ours(self, load: all_sizes.Training, what: str, changes: dict[str, Any]) -> None:
        seen: dict[int, float] = {}

        def on_event(event: dict[str, Any]) -> None:
            now = time.monotonic()
            if event["event"] != "progress":
                self.report.log(str(event.get("message", event["event"])))
            elif found := re.match(r"epoch 1/2 step (\d+)/", event["message"]):
                seen[int(found.group(1))] = now

        result = self._run_worker(load, what, changes, on_event)
        told = f"{what}, {result['forward']}"
        self._speed(load, what, told, seen, result["tokens_a_step"])
        row, part = self.report.row, load.name
        row(part, f"{told}: by its own clock", result["tokens_per_s"], "tok/s")
        row(part, f"{told}: waits for data", 100 * result["data_wait_share"], "%")
        row(part, f"{told}: peak memory", result["peak_memory_bytes"] / 2**30, "GiB")
        for name, value in result["split"].items():
            row(part, f"{what}: split: {name}", value, "ms per step")
        self.report.check(f"{load.name}: {what} takes its steps", result["steps"] >= load.measured[1], result["steps"])

    def _run_worker(
        self, load: all_sizes.Training, what: str, changes: dict[str, Any], on_event: Any
    ) -> dict[str, Any]:
        """Under a lease, as the stage does it."""
        settings: dict[str, Any] = {"accumulate": 1, "epochs": 2, "attention": "auto", "log_every_s": 1e-6, **changes}
        if not self.num_gpus:
            settings |= {"device": "cpu", "num_threads": 1}
        output = self.home / f"{load.name} {'equal' if changes else 'default'}"
        spec = job(self.home / load.name, load.draft, self._data[load.name][0], output, 1, **settings)
        spec |= {"after": load.measured[0], "split_steps": load.split_steps}
        watch = threading.Timer(3 * self.sizes.train_start_s, _kill_workers)
        watch.daemon = True
        watch.start()
        try:
            with self.manager.lease(1, "training", 60.0, self.report.log, "none") as lease:
                environment = lease.environment()
                return run_worker(_WORKER, spec, output / "run", on_event, TrainingError, what, environment)
        finally:
            watch.cancel()

    def _theirs(self, load: all_sizes.Training) -> None:
        data, size = self._data[load.name][1], load.draft
        row_bytes = (len(size.aux_layer_ids) + 1) * size.verifier.hidden * 2
        workers = speculators_train.num_workers(size.batch_tokens * row_bytes)
        save = self.home / f"{load.name} speculators"
        given = speculators_train.arguments(self.home / load.name, size, data, save, load.every, workers)
        log, last = self.home / f"{load.name} speculators.log", load.measured[1]
        told = speculators_train.train(given, last, log, 3 * self.sizes.train_start_s, not self.num_gpus)
        tokens, steps = data.tokens_a_step(size.batch_tokens)
        what = f"{THEIRS}, {speculators_train.loss_implementation()} loss, {workers} data-loader processes"
        self._speed(load, THEIRS, what, told.seen, tokens)
        measured = [parts for step, parts in told.parts.items() if step >= load.measured[0]]
        for name in _PARTS:
            mean = sum(_part(parts, name) for parts in measured) / len(measured)
            self.report.row(load.name, f"{THEIRS}: split: {name}", mean, "ms per step")
        self.report.check(f"{load.name}: {THEIRS} takes its steps", steps >= last, steps)

    def _speed(
        self, load: all_sizes.Training, who: str, what: str, seen: dict[int, float], tokens_a_step: float
    ) -> None:
        first, last = load.measured
        speed = (last - first) * tokens_a_step / (seen[last] - seen[first])
        self._speeds[load.name, who] = speed
        self.report.row(load.name, what, speed, "tok/s")
        self.report.row(load.name, f"{who}: tokens of a step", tokens_a_step)

    def _compare(self, load: all_sizes.Training) -> None:
        ours, theirs = (self._speeds.get((load.name, who), 0.0) for who in (OURS, THEIRS))
        if ours and theirs:
            self.report.row(load.name, f"{OURS} / {THEIRS}", ours / theirs)


def _part(parts: dict[str, float], name: str) -> float:
    """Milliseconds of a part; the command's time of fetching a batch holds that of moving it to the device."""
    return parts[name] - (parts["h2d_ms"] if name == "fetch_ms" else 0.0)


def _kill_workers() -> None:
    """Ends a worker that hangs; `run_worker` then fails."""
    for child in psutil.Process().children(recursive=True):
        if _WORKER in child.cmdline():
            child.kill()
