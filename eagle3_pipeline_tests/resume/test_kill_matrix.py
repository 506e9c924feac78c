"""SIGKILL of each process at each point of a chunk's life, on the fake engine.

The victims: the engine's core, its host, a process that runs the stage, and a Dagster run worker (whose step process
lives on). Afterwards nothing half-made is visible, finished chunks are kept, a rerun loads at most once more and gives
the same content, and neither process nor lease is left.
"""

import os
import subprocess
import threading
from dataclasses import dataclass, replace

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.engine.breaker import reset_failures
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES
from eagle3_pipeline.store.shards import bf16_to_float32
from eagle3_pipeline_tests.fake_engine import answer_tokens, state_bits
from eagle3_pipeline_tests.resume.conftest import (
    FAKE,
    FIRST,
    OUTPUTS,
    PROMPTS,
    SECOND,
    Home,
    end_process,
)
from eagle3_pipeline_tests.resume.gated import light_tokenizer
from eagle3_pipeline_tests.state_parity import captured_states
from eagle3_pipeline_tests.store.children import Child, wait_until
from eagle3_pipeline_tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CORE, HOST, STEP, WORKER = "engine_core", "host", "client_step", "run_worker"
# Of two requests in flight, the third and fourth of the chunk are held.
NUM_ANSWERED = 2
LAYER_IDS, HIDDEN = (2, 4, 5, 8), 128
IM_END = 2


@dataclass(frozen=True)
class Point:
    """Where a process is killed: the closed gate, loads until then, and what of the chunk is published."""

    gate: str
    num_loads: int
    visible: tuple[str, ...] = ()


POINTS = {
    "starting": Point("host", 0),
    "loading": Point("loading", 1),
    "mid_capture": Point("answers", 1),
    "before_generations": Point("publish-synthetic_generations", 1),
    "before_states": Point("publish-hidden_states", 1, (ids.SYNTHETIC_GENERATIONS,)),
}
# A core starts within the load.
CORE_POINTS = POINTS | {"starting": Point("core", 1)}


def cells() -> list:
    return [
        pytest.param(victim, name, id=f"{victim}-{name}") for victim in (CORE, HOST, STEP, WORKER) for name in POINTS
    ]


def point_of(victim: str, name: str) -> Point:
    return (CORE_POINTS if victim == CORE else POINTS)[name]


def hold(home: Home, victim: str, name: str) -> tuple[subprocess.Popen, int]:
    """Starts the second chunk and holds it at the point; returns its process and the victim's pid."""
    point = point_of(victim, name)
    home.close_gate(point.gate, NUM_ANSWERED)
    started = home.start_run_worker(SECOND) if victim == WORKER else home.start_step(SECOND)
    home.wait_reached(point.gate)
    if name == "mid_capture":
        wait_until(lambda: home.num_journalled() == NUM_ANSWERED)
    host = home.host_pid()
    assert home.num_starts() == point.num_loads
    if victim == CORE:
        (core,) = [child for child in psutil.Process(host).children() if child.name() == "sleep"]
        return started, core.pid
    return started, host if victim == HOST else started.pid


def assert_second_chunk_is_right(home: Home) -> None:
    """Works out sequences and states of the second chunk's prompts."""
    tokenizer = light_tokenizer(home.context.verifier.path, False)
    expected = []
    for prompt in PROMPTS[4:]:
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids_ = tokenizer(text, add_special_tokens=False)["input_ids"]
        expected.append(ids_ + answer_tokens(ids_, FAKE["generation"]["max_new_tokens"], (IM_END,), VOCAB_SIZE))
    sequences, states = (home.context.upstream(stage, SECOND) for stage in OUTPUTS)
    rows = pq.read_table(sequences.path(SEQUENCES)).to_pylist()
    assert [row["input_ids"] for row in rows] == expected
    found = captured_states(states)
    assert len(found) == len(expected)
    for row in rows:
        bits = state_bits(row["input_ids"][:-1], LAYER_IDS, HIDDEN)
        np.testing.assert_array_equal(found[row["sequence_id"]], bf16_to_float32(bits))


@pytest.mark.parametrize(("victim", "name"), cells())
def test_a_kill_costs_at_most_one_load_and_no_finished_work(home: Home, victim: str, name: str) -> None:
    point, finished = point_of(victim, name), home.manifests(FIRST)
    started, pid = hold(home, victim, name)
    end_process(pid)
    assert home.visible(SECOND) == list(point.visible)
    assert {stage: len(home.published(stage)) for stage in OUTPUTS} == {
        stage: 1 + (stage in point.visible) for stage in OUTPUTS
    }
    if victim == WORKER:
        assert started.pid in {os.getsid(process.pid) for process in home.processes()}, "its step process lives on"
        home.open_gates()
        assert home.rerun_job(SECOND).success
        started.wait(10)
    elif victim == STEP and name in ("starting", "loading"):
        assert started.wait(30) == -9
        with home.gates_open_once_another_host_starts():
            home.rerun(SECOND)
    else:
        home.open_gates()
        code = started.wait(30)
        assert code in expected_exits(victim, name), home.output()
        home.rerun(FIRST)
        home.rerun(SECOND)
    assert_second_chunk_is_right(home)
    assert home.visible(SECOND) == list(OUTPUTS)
    assert home.manifests(FIRST) == finished
    if victim == HOST and name.startswith("before"):
        wait_until(lambda: home.processes() == [])
        # Nobody started another engine, so the dead host's record is still there for whoever comes next.
        with home.context.engines.lease(1, "whoever comes next", 10.0, print, ""):
            assert home.processes() == []
    home.assert_nothing_left(timeout_s=15)
    assert home.num_starts() <= point.num_loads + 1


def expected_exits(victim: str, name: str) -> set[int]:
    """Of the process that runs the stage: killed, failed with its engine, or done where all answers are in."""
    if victim == STEP:
        return {-9}
    if (victim, name) == (CORE, "before_generations"):
        # A host that still runs is asked to capture one sequence again, one that is gone is not.
        return {0, 1}
    return {0} if name.startswith("before") else {1}


def test_work_of_the_killed_engine_is_reused(home: Home) -> None:
    started, pid = hold(home, HOST, "mid_capture")
    end_process(pid)
    home.open_gates()
    assert started.wait(30) == 1
    assert "the engine died while it worked" in home.output()
    made = home.rerun(SECOND)
    assert made.generations
    assert made.generations.manifest.metrics["num_reused_rows"] == NUM_ANSWERED


@pytest.mark.parametrize("name", ["starting", "loading"])
def test_after_a_reset_a_core_killed_while_loading_costs_one_load(home: Home, name: str) -> None:
    started, pid = hold(home, CORE, name)
    end_process(pid)
    home.open_gates()
    assert started.wait(30) == 1
    assert "the fake engine's core died" in home.output()
    for state in home.context.engines.engines():
        reset_failures(state.folder)
    home.rerun(SECOND)
    assert_second_chunk_is_right(home)
    assert home.num_starts() == 2
    home.assert_nothing_left(timeout_s=15)


LOAD = """
    import sys
    from pathlib import Path
    from eagle3_pipeline.engine.manager import EngineManager
    from eagle3_pipeline.engine.spec import EngineSpec
    EngineManager(Path(sys.argv[1]), 2).acquire(EngineSpec.from_json(sys.argv[2]), print)
"""


def test_a_load_that_a_killed_step_left_behind_does_not_displace_a_later_engine(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two devices, so that the engine of the rerun need not wait for the lease of the first one."""
    spec = replace(home.context.capturing_engine_spec(), num_gpus=1)
    manager = EngineManager(home.path, 2)
    home.close_gate("loading")
    with Child(LOAD, home.path, spec.to_json()) as step:
        home.wait_reached("loading")
        first = home.host_pid()
        step.kill()
    monkeypatch.delenv("EAGLE3_FAKE_GATES")
    # A fixed package may wait here for the first host.
    threading.Timer(5.0, home.open_gates).start()
    with manager.acquire(spec, print) as client:
        engine = client.request("info")["pid"]
        home.open_gates()
        wait_until(lambda: engine == first or not psutil.pid_exists(first))
        with manager.acquire(spec, print) as other:
            assert other.request("info")["pid"] == engine
        assert client.request("info")["pid"] == engine
    assert home.num_starts() <= 2
