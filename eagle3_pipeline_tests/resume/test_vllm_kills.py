"""SIGKILL of a real engine's host and core, on CPU."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.stages import templates
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES
from eagle3_pipeline_tests.resume import gated
from eagle3_pipeline_tests.resume.conftest import (
    FIRST,
    OUTPUTS,
    Home,
    end_process,
    use_home,
    write_pipeline,
)
from eagle3_pipeline_tests.state_parity import assert_states_match_transformers
from eagle3_pipeline_tests.store.children import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(600)]

NUM_PROMPTS = 12
VLLM: dict[str, dict[str, Any]] = {
    "dataset": {"samples_per_chunk": NUM_PROMPTS},
    "generation": {"max_new_tokens": 64, "max_sequence_tokens": 160},
    "vocab": {"draft_vocab_size": 64},
    "training": {"batch_tokens": 160},
    "resources": {"num_gpus": 0, "max_num_seqs": 1, "max_num_batched_tokens": 256, "idle_timeout_s": 5.0},
}
# Logits of two float32 implementations differ by less.
NEAR_TIE = 1e-3
LOAD_S = 240.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama and one chunk's prompts."""
    folder = tmp_path_factory.mktemp("source")
    write_pipeline(folder, VLLM, [f"say something of number {i}" for i in range(NUM_PROMPTS)])
    return folder


@pytest.fixture
def vllm_home(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home with the chunk's conversations."""
    use_home(monkeypatch, tmp_path / "home", source / "pipelines")
    monkeypatch.setattr(templates, "load_tokenizer", gated.light_tokenizer)
    made = Home(tmp_path / "home")
    made.gates.mkdir(parents=True)
    spec = find_pipeline(gated.PIPELINE)
    made.context.registry.sync(spec)
    materialise_dataset(StageContext(spec), FIRST)
    yield made
    made.end()


def core_of(host: int) -> psutil.Process | None:
    """vLLM's engine core; multiprocessing's resource tracker is a child of the host too."""
    for child in psutil.Process(host).children():
        # One that has just ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(child.cmdline())
            if "EngineCore" in command or "spawn_main" in command:
                return child
    return None


def hold(home: Home, victim: str, point: str) -> tuple[subprocess.Popen, int]:
    """Starts the chunk; returns its process and the victim's pid once the point is reached."""
    started = home.start_step(FIRST)
    wait_until(lambda: home.host_phase() == "loading", LOAD_S)
    host = home.host_pid()
    if point == "mid_capture":
        wait_until(lambda: home.num_journalled() >= 2, LOAD_S)
    else:
        wait_until(lambda: core_of(host), LOAD_S)
    core = core_of(host)
    assert core is not None
    return started, host if victim == "host" else core.pid


def assert_chunk_is_right(home: Home, model_folder: Path) -> None:
    """Every answer is the greedy one, and every state that of Transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    sequences, states = (home.context.upstream(stage, FIRST) for stage in OUTPUTS)
    assert_states_match_transformers(model_folder, sequences, states)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    rows = pq.read_table(sequences.path(SEQUENCES)).to_pylist()
    assert len(rows) == NUM_PROMPTS
    for row in rows:
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        chosen = logits.gather(1, ids[1:, None])[:, 0]
        assert bool((chosen >= logits.max(dim=1).values - NEAR_TIE)[mask[1:]].all())


def assert_a_rerun_ends_it(home: Home, model_folder: Path, num_answered: int, num_starts: int) -> None:
    """After so many starts of engines in all; nothing is answered twice."""
    made = home.rerun(FIRST)
    assert made.generations
    assert made.generations.manifest.metrics["num_reused_rows"] == num_answered
    assert home.num_starts() == num_starts
    assert_chunk_is_right(home, model_folder)
    home.assert_nothing_left(timeout_s=60)


@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("host", "loading"),
        ("host", "mid_capture"),
        ("engine_core", "loading"),
        ("engine_core", "mid_capture"),
    ],
)
def test_a_killed_engine_costs_one_load_and_no_answer(vllm_home: Home, source: Path, victim: str, point: str) -> None:
    started, pid = hold(vllm_home, victim, point)
    end_process(pid)
    assert started.wait(120) == 1, vllm_home.output()
    journalled = vllm_home.num_journalled()
    assert (2 <= journalled < NUM_PROMPTS) if point == "mid_capture" else journalled == 0
    assert [vllm_home.published(stage) for stage in OUTPUTS] == [set(), set()]
    assert_a_rerun_ends_it(vllm_home, source / "model", journalled, num_starts=2)


def test_a_killed_step_costs_no_load(vllm_home: Home, source: Path) -> None:
    """One of its requests waits behind the other; vLLM 0.24's own connector ends the engine when it is aborted."""
    started, _ = hold(vllm_home, "host", "mid_capture")
    end_process(started.pid)
    started.wait(60)
    journalled = vllm_home.num_journalled()
    assert 2 <= journalled < NUM_PROMPTS
    assert_a_rerun_ends_it(vllm_home, source / "model", journalled, num_starts=1)
