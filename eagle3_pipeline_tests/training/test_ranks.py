"""Two processes under torchrun train what one does on the same steps; killed and resumed they still do."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.ranks import Ranks
from eagle3_pipeline.workers import run_worker
from eagle3_pipeline_tests.training.conftest import SpecMaker

SETTINGS: dict[str, Any] = {"epochs": 2, "lr": 1e-2, "batch_tokens": 48, "accumulate": 3, "num_threads": 1}
WORKER = "eagle3_pipeline.training.worker"
TORCHRUN = "eagle3_pipeline.training.torchrun"


def run(spec: dict[str, Any], folder: Path, num_processes: int) -> dict[str, Any]:
    launcher = (TORCHRUN, str(num_processes)) if num_processes > 1 else ()
    return run_worker(WORKER, spec, folder, lambda _event: None, TrainingError, "training", launcher=launcher)


def step_values(output: Path, name: str) -> list[float]:
    rows = pq.read_table(output / "metrics.parquet").to_pylist()
    return [row["value"] for row in rows if (row["kind"], row["name"]) == ("step", name)]


def test_batches_are_dealt_out_in_turn() -> None:
    assert [Ranks(rank, 2).deal(5) for rank in range(2)] == [[0, 2, 4], [1, 3]]
    assert [Ranks(rank, 4).deal(2) for rank in range(4)] == [[0], [1], [], []]
    assert Ranks().deal(3) == [0, 1, 2]


@pytest.mark.parametrize("noise", ["none", "gaussian"])
def test_two_processes_equal_one_on_the_same_global_batch(spec_in: SpecMaker, tmp_path: Path, noise: str) -> None:
    """Three batches a step: two for one process, one for the other; a last step may have fewer than processes."""
    settings = {**SETTINGS, "noise": {"kind": noise}}
    results = {}
    for world in (1, 2):
        spec = spec_in(tmp_path / f"out-{world}", **settings)
        results[world] = run(spec, tmp_path / f"run-{world}", world)["metrics"]
    assert results[1]["steps"] == results[2]["steps"] > 3
    for name in ("loss", "grad_norm", "lr"):
        one, two = (step_values(tmp_path / f"out-{world}", name) for world in (1, 2))
        assert two == pytest.approx(one, rel=1e-3), name
    assert results[2]["val_acceptance_length"] == pytest.approx(results[1]["val_acceptance_length"], rel=1e-3)
    alone, together = (load_file(tmp_path / f"out-{world}" / "model.safetensors") for world in (1, 2))
    for name, tensor in alone.items():
        difference = (tensor.float() - together[name].float()).norm() / tensor.float().norm().clamp(min=1e-6)
        # Weights are stored in bf16, whose last bit is 0.4 %.
        assert float(difference) < 4e-3, name


@pytest.mark.slow
def test_a_killed_rank_ends_all_and_a_rerun_equals_the_uninterrupted_one(spec_in: SpecMaker, tmp_path: Path) -> None:
    whole = spec_in(tmp_path / "whole", {"resume_every_s": 0}, **SETTINGS)
    run(whole, tmp_path / "run", 2)
    spec = spec_in(tmp_path / "cut", {"resume_every_s": 0}, **SETTINGS)
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec))
    command = [sys.executable, "-m", TORCHRUN, "2", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "cut" / "resume" / "state.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    ranks = [p for p in psutil.Process(process.pid).children(recursive=True) if WORKER in p.cmdline()]
    assert len(ranks) == 2
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert process.wait(60) != 0
    psutil.wait_procs(ranks, 30)
    assert not any(rank.is_running() for rank in ranks)
    run(spec, tmp_path / "run", 2)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_runs_torchrun(spec_in: SpecMaker, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec_in(tmp_path / "out", **{**SETTINGS, "epochs": 500})))
    code = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-m', {TORCHRUN!r}, '2', {str(path)!r}], stdout=subprocess.DEVNULL)\n"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    found: list[psutil.Process] = []
    while len(found) < 2 and time.monotonic() < deadline:
        found = [p for p in psutil.Process(runner.pid).children(recursive=True) if WORKER in p.cmdline()]
        time.sleep(0.05)
    time.sleep(3)
    runner.kill()
    runner.wait()
    _, alive = psutil.wait_procs(found, 30)
    assert len(found) == 2 and not alive


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_all_gpus_equal_one_on_the_same_global_batch(spec_in: SpecMaker, tmp_path: Path) -> None:
    """As many processes as GPUs, over NCCL. The first step sees equal weights; later ones carry bf16 rounding along."""
    world = torch.cuda.device_count()
    # Heads of this size are too small for flex attention.
    small = {"device": "cuda", "attention": "sdpa", "noise": {"kind": "gaussian"}}
    settings = {**SETTINGS, **small, "accumulate": 2 * world}
    for number in (1, world):
        run(spec_in(tmp_path / f"out-{number}", **settings), tmp_path / f"run-{number}", number)
    for name, tolerance in (("loss", 1e-2), ("grad_norm", 3e-2)):
        one, many = (step_values(tmp_path / f"out-{number}", name) for number in (1, world))
        print(name, one, many)
        assert many[0] == pytest.approx(one[0], rel=1e-3)
        assert many == pytest.approx(one, rel=tolerance), name
