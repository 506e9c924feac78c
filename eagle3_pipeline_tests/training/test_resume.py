"""A killed and resumed run equals an uninterrupted one, bit for bit."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import Trainer, train
from eagle3_pipeline.training.resume import ResumeStore
from eagle3_pipeline_tests.training.conftest import Events, SpecMaker

SETTINGS: dict[str, Any] = {"epochs": 3, "lr": 1e-2, "batch_tokens": 48, "accumulate": 2, "weight_decay": 0.01}
EVERY_STEP = {"resume_every_s": 0}
TIMING = {"tokens_per_s", "data_wait_share", "peak_memory_bytes"}


class Killed(Exception):
    """Stands for the end of the process."""


def files(output: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What must be equal: the weights, and every metric that is not a time or a size of this process."""
    rows = [r for r in pq.read_table(output / "metrics.parquet").to_pylist() if r["name"] not in TIMING]
    return (output / "model.safetensors").read_bytes(), rows


def test_killed_while_exporting(
    spec_in: SpecMaker, tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Job.parse(spec_in(tmp_path / "whole", **SETTINGS)), events)
    job = Job.parse(spec_in(tmp_path / "cut", **SETTINGS))

    def die(model: Any, folder: Path) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("eagle3_pipeline.training.loop.export_draft", die)
        train(job, events)
    train(job, events)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stopped_at_any_step_equals_uninterrupted(
    spec_in: SpecMaker, tmp_path: Path, events: Events, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    whole = train(Job.parse(spec_in(tmp_path / "whole", EVERY_STEP, **SETTINGS, optimizer=optimizer)), events)
    job = Job.parse(spec_in(tmp_path / "cut", EVERY_STEP, **SETTINGS, optimizer=optimizer))
    step, num_steps = Trainer._step, int(whole["metrics"]["steps"])
    stops = sorted(random.Random(optimizer).sample(range(1, num_steps), 2))
    for stop in stops:

        def step_or_die(self: Trainer, group: Any, stop: int = stop) -> None:
            if self.progress.step == stop:
                raise Killed
            step(self, group)

        monkeypatch.setattr(Trainer, "_step", step_or_die)
        with pytest.raises(Killed):
            train(job, events)
        # A resumed process has another generator state than the one that died.
        torch.manual_seed(99)
    monkeypatch.setattr(Trainer, "_step", step)
    resumed = train(job, events)
    assert [e["message"] for e in events.of("log") if "resumed" in e["message"]][-1].endswith(f"step {stops[1]}")
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    equal = resumed["metrics"].keys() - TIMING
    assert {k: resumed["metrics"][k] for k in equal} == {k: whole["metrics"][k] for k in equal}
    assert not (tmp_path / "cut" / "resume").exists()


def test_killed_worker_goes_on(spec_in: SpecMaker, tmp_path: Path, events: Events) -> None:
    train(Job.parse(spec_in(tmp_path / "whole", EVERY_STEP, **SETTINGS)), events)
    output = tmp_path / "cut"
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(spec_in(output, EVERY_STEP, **SETTINGS)))
    command = [sys.executable, "-m", "eagle3_pipeline.training.worker", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None and not (output / "resume" / "state.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(random.random() * 0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not (output / "config.json").exists():
        assert (output / "resume" / "state.pt").exists()
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    last = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, last["event"]) == (0, "result"), done.stderr
    assert files(output) == files(tmp_path / "whole")


def test_state_of_another_fingerprint_is_ignored(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path, "old")
    store.save({"progress": {"best_epoch": 0}})
    assert ResumeStore(tmp_path, "old").load() is not None
    assert ResumeStore(tmp_path, "new").load() is None


def test_damaged_state_is_ignored(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path, "f")
    store.save({"progress": {"best_epoch": 0}})
    path = tmp_path / "resume" / "state.pt"
    path.write_bytes(path.read_bytes()[:-30])
    assert store.load() is None
    path.write_bytes(b"not a state")
    assert store.load() is None


@pytest.mark.parametrize("name", ["state.pt", "best-0001.pt"])
def test_a_flipped_bit_in_any_weight_is_found(tmp_path: Path, name: str) -> None:
    store, weights = ResumeStore(tmp_path, "f"), torch.arange(1, 1001, dtype=torch.float32)
    store.save_best(1, {"a": weights})
    store.save({"progress": {"best_epoch": 1}, "model": {"a": weights}})
    path = tmp_path / "resume" / name
    data = bytearray(path.read_bytes())
    data[data.index(weights.numpy().tobytes()) + 1234] ^= 4
    assert store.load() is not None and store.is_there()
    path.write_bytes(data)
    assert store.load() is None and store.is_there()


@pytest.mark.parametrize("state", [[1, 2], {"format": 2}, {"format": 2, "fingerprint": "f"}, torch.ones(3)])
def test_a_file_of_something_else_is_no_state(tmp_path: Path, state: object) -> None:
    (tmp_path / "resume").mkdir()
    torch.save(state, tmp_path / "resume" / "state.pt")
    assert ResumeStore(tmp_path, "f").load() is None


def test_state_without_its_best_weights_is_ignored(tmp_path: Path) -> None:
    store = ResumeStore(tmp_path, "f")
    store.save_best(1, {"a": torch.ones(2)})
    store.save_best(2, {"a": torch.zeros(2)})
    store.save({"progress": {"best_epoch": 2}})
    assert sorted(p.name for p in (tmp_path / "resume").iterdir()) == ["best-0002.pt", "state.pt"]
    assert torch.equal(store.load_best(2)["a"], torch.zeros(2))
    (tmp_path / "resume" / "best-0002.pt").unlink()
    assert store.load() is None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_five_random_steps_equals_uninterrupted(spec_in: SpecMaker, tmp_path: Path) -> None:
    """By SIGKILL and SIGTERM in turn, each at a step of its own, always in the same folder."""
    settings = {**SETTINGS, "epochs": 6, "log_every_s": 1e-6}
    runs = {name: tmp_path / f"{name}.json" for name in ("whole", "cut")}
    for name, path in runs.items():
        path.write_text(json.dumps(spec_in(tmp_path / name, EVERY_STEP, **settings)))
    assert _work(runs["whole"]) == 0
    num_steps = len(pq.read_table(tmp_path / "whole" / "metrics.parquet").filter(pc.field("name") == "lr"))
    stops = sorted(random.sample(range(1, num_steps - 1), 5))
    for number, stop in enumerate(stops):
        before = stops[number - 1] if number else 0
        sent = (signal.SIGKILL, signal.SIGTERM)[number % 2]
        assert _work(runs["cut"], stop - before, sent) == -sent, f"killed at {stops}"
    assert _work(runs["cut"]) == 0
    assert files(tmp_path / "cut") == files(tmp_path / "whole"), f"killed at {stops}"


def _work(spec: Path, num_steps: int = -1, sent: signal.Signals = signal.SIGKILL) -> int:
    """Runs a worker and ends it after so many progress events, one a step; its exit code."""
    command = [sys.executable, "-m", "eagle3_pipeline.training.worker", str(spec)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout
    for line in process.stdout:
        num_steps -= json.loads(line)["event"] == "progress"
        if num_steps == 0:
            process.send_signal(sent)
            break
    process.stdout.read()
    return process.wait(60)
