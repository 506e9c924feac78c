"""The usual way to train: the command `speculators train`, on the same sequences with a file of states each."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

from eagle3_pipeline.workers import log_tail
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import DraftSize
from eagle3_pipeline_tests.benchmarks.multi_gpu.training_data import NUM_VALIDATION

_ON_CPU = "eagle3_pipeline_tests.benchmarks.one_gpu.speculators_on_cpu"
# Before it, dynamo does not compile the fused loss.
_FUSED_SINCE = Version("2.12")
_WORKERS, _WRITERS = 8, 8
_SEED = 42  # of `speculators train`


class OfflineData:
    """The folder that `speculators train --data-path` reads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
        self._writers, self._writes = ThreadPoolExecutor(_WRITERS), list[Future]()
        (folder / "hidden_states").mkdir(parents=True)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return self._rows["seq_len"]

    def add(self, ids: np.ndarray, mask: np.ndarray, states: torch.Tensor) -> None:
        """Writes a sequence's states [n, A+1, H], of all its tokens; the caller does not change them any more."""
        tensors = {"hidden_states": states.contiguous(), "token_ids": torch.from_numpy(ids).long()}
        path = self.folder / "hidden_states" / f"hs_{len(self.lengths)}.safetensors"
        self._writes.append(self._writers.submit(save_file, tensors, path))
        for name, value in zip(self._rows, (ids.tolist(), mask.tolist(), len(ids)), strict=True):
            self._rows[name].append(value)

    def finish(self, vocab_map: Path, draft_vocab: int) -> None:
        """Writes sequences and the vocabulary map."""
        import datasets

        for write in self._writes:
            write.result()
        self._writers.shutdown()
        datasets.Dataset.from_dict(self._rows).with_format("torch").save_to_disk(str(self.folder))
        for name, value in load_file(vocab_map).items():
            np.save(self.folder / f"{name}-{draft_vocab}.npy", value.numpy())

    def tokens_a_step(self, batch_tokens: int) -> tuple[float, int]:
        """Mean positions that are trained on in a step, and the steps of an epoch."""
        from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

        lengths = np.array(self.lengths[:-NUM_VALIDATION])
        steps = len(MultipackDistributedBatchSamplerV2(batch_tokens, lengths, 1, 0, seed=_SEED))
        return float((lengths - 1).sum()) / steps, steps


@dataclass
class Told:
    """What the command told of its steps: when it was seen, and milliseconds of their parts."""

    seen: dict[int, float] = field(default_factory=dict)
    parts: dict[int, dict[str, float]] = field(default_factory=dict)


def num_workers(batch_bytes: int, wanted: int = _WORKERS) -> int:
    """Data-loader processes, half the cores at most, whose start is what the first step waits for.

    They hand over batches in shared memory, of which containers may have little; 0: the command reads by itself.
    """
    workers = min(wanted, len(os.sched_getaffinity(0)) // 2)
    memory = os.statvfs("/dev/shm")
    return workers if memory.f_bavail * memory.f_frsize > 2 * workers * batch_bytes else 0


def loss_implementation() -> str:
    """The command's default where it works."""
    works = torch.cuda.is_available() and Version(torch.__version__.partition("+")[0]) >= _FUSED_SINCE
    return "fused" if works else "eager"


def arguments(verifier: Path, size: DraftSize, data: OfflineData, save: Path, every: int, workers: int) -> list[str]:
    """Of `speculators train`: what makes the work equal, what is faster than the default, and else the defaults.

    Equal: full attention, no norms around `fc`, AdamW (the default is Muon, which works more), batches. Faster: a line
    of progress, for which the command waits for the GPU several times in a step, only every few steps. With its default
    of 12 processes that read 4 batches ahead each, so short a run would have been read before its first step.
    """
    ratio = (len(data.lengths) - NUM_VALIDATION + 0.5) / len(data.lengths)
    given = {
        "verifier-name-or-path": verifier,
        "speculator-type": "eagle3",
        "data-path": data.folder,
        "save-path": save,
        "draft-vocab-size": size.draft_vocab,
        "mask-token-id": 0,
        "full-attention-indices": 0,
        "total-seq-len": size.batch_tokens,
        "train-data-ratio": ratio,
        "num-workers": workers,
        "prefetch-factor": 1,
        "on-missing": "raise",
        "loss-implementation": loss_implementation(),
        "ttt-steps": 3,
        "optimizer": "adamw",
        "lr": 1e-4,
        "weight-decay": 0.0,
        "epochs": 1,
        "log-freq": every,
        "log-dir": save / "logs",
    }
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    layers = ["--target-layer-ids", *map(str, size.aux_layer_ids)]
    return [*flags, *layers, "--no-norm-before-fc", "--no-norm-output", "--no-resume-from-checkpoint"]


@contextlib.contextmanager
def run(
    given: list[str], log: Path, on_cpu: bool, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen]:
    """The running command, its errors in `log`; at the end it is killed, its data-loader processes too."""
    command = [sys.executable, "-m", *([_ON_CPU] if on_cpu else ["speculators", "train"]), *given]
    # Lines of progress are not to be wrapped, and seen when they are written.
    shown = {"COLUMNS": "8000", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    log.unlink(missing_ok=True)
    # What it prints is added to the same file.
    with log.open("a") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **(environment or {}), **shown},
            # A group of its own, so that all of it can be ended.
            start_new_session=True,
        )
        try:
            yield process
        finally:
            _kill(process)
            process.wait()


def told_lines(process: subprocess.Popen, log: Path) -> Iterator[str]:
    """What the command prints, line by line; it is added to the log."""
    with log.open("a") as file:
        for line in process.stdout or ():
            file.write(f"{line.rstrip()}\n")
            yield line


def train(given: list[str], last: int, log: Path, timeout_s: float, on_cpu: bool) -> Told:
    """Runs the command until it told of step `last` (the first is 1), then ends it: checkpoints are not measured.

    Raises:
        RuntimeError: it ended earlier, or was ended because it took too long.
    """
    told = Told()
    with run(given, log, on_cpu) as process:
        watch = threading.Timer(timeout_s, _kill, [process])
        watch.start()
        try:
            for line in told_lines(process, log):
                now = time.monotonic()
                if found := re.search(r"global_step=(\d+)", line):
                    step = int(found.group(1)) + 1
                    told.seen[step] = now
                    told.parts[step] = {n: float(v) for n, v in re.findall(r"profile/(\w+_ms)=([\d.e+-]+)", line)}
                    if step >= last:
                        return told
        finally:
            watch.cancel()
    raise RuntimeError(f"speculators train ended after step {max(told.seen, default=0)} of {last}:\n{log_tail(log)}")


def _kill(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
