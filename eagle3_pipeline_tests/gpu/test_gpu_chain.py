"""The chain on one GPU, without Dagster: capture parity, training, serving. `pytest -m gpu` on a GPU machine."""

import json
import multiprocessing
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.engine.devices import count_gpus
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.baseline import materialise_baseline
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.draft_checkpoint import materialise_checkpoint
from eagle3_pipeline.stages.draft_evaluation import materialise_evaluation
from eagle3_pipeline.stages.prompting import JOURNAL, PromptBatch, run_prompts
from eagle3_pipeline.stages.published_draft import publish_draft
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs
from eagle3_pipeline.stages.vocab_map import materialise_vocab_map
from eagle3_pipeline_tests.state_parity import assert_states_match_transformers
from eagle3_pipeline_tests.store.children import wait_until
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not count_gpus(), reason="no NVIDIA GPU on this machine"),
]
CHUNK = "000000"
# The verifier computes in bf16 here, and random weights amplify its rounding from layer to layer.
BF16_TOLERANCE = 0.06


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageContext]:
    home = tmp_path_factory.mktemp("home")
    os.environ["EAGLE3_HOME"] = str(home)
    make_tiny_llama(home / "tiny")
    prompts = [f"tell {a} of {b}" for a in ("river", "stone", "lamp") for b in ("paper", "cloud", "winter", "door")]
    (home / "data.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))
    lines = [json.dumps({"category": "c", "prompt": f"say {i}"}) + "\n" for i in range(4)]
    (home / "prompts.jsonl").write_text("".join(lines))
    spec = PipelineSpec.model_validate(
        {
            "name": "gpu",
            "verifier": {"model": str(home / "tiny"), "dtype": "bfloat16"},
            "dataset": {"path": str(home / "data.jsonl")},
            "generation": {"max_new_tokens": 32, "max_sequence_tokens": 128, "temperature": 0.7},
            "vocab": {"draft_vocab_size": 160, "min_coverage": 0.3},
            "training": {"epochs": 2, "lr": 3e-3, "batch_tokens": 256, "min_validation_samples": 3},
            "evaluation": {"prompts": str(home / "prompts.jsonl"), "max_new_tokens": 24},
            "resources": {
                "num_gpus": 1,
                "gpu_memory_utilization": 0.2,
                # Whatever else is on the GPU.
                "gpu_kvcache_gib": 4.0,
                "max_num_seqs": 16,
                "enforce_eager": True,
            },
        }
    )
    made = StageContext(spec, home=home)
    made.registry.sync(spec)
    yield made
    made.engines.stop_all(print)


def test_sampled_states_match_transformers(context: StageContext) -> None:
    materialise_dataset(context, CHUNK)
    made = materialise_outputs(context, CHUNK)
    assert made.generations and made.hidden_states
    assert made.hidden_states.manifest.metrics["one_pass"] == 1
    worst = assert_states_match_transformers(
        Path(context.verifier.path), made.generations.artifact, made.hidden_states.artifact, BF16_TOLERANCE
    )
    print("largest relative error by layer:", worst)


def _answer(spec: PipelineSpec, home: Path, folder: Path, num_prompts: int) -> None:
    context = StageContext(spec, home=home)
    rows = [{"sequence_id": f"s{i}", "input_ids": [3 + i % 50] * 24} for i in range(num_prompts)]
    sampling = {"temperature": 0.7, "max_tokens": 100, "ignore_eos": True}
    batch = PromptBatch("answers", folder, rows, sampling, folder / "states", include_output=True)
    answers, _ = run_prompts(context, context.capturing_engine_spec(), batch)
    assert len(answers) == num_prompts


def test_a_job_that_is_killed_while_requests_wait_leaves_the_engine_alive(
    context: StageContext, tmp_path: Path
) -> None:
    """vLLM 0.24's own connector ends the engine when a request is aborted that was never scheduled."""
    arguments = (context.spec, context.home, tmp_path / "killed", 4096)
    process = multiprocessing.get_context("spawn").Process(target=_answer, args=arguments, daemon=True)
    process.start()
    journal = tmp_path / "killed" / JOURNAL
    wait_until(lambda: journal.exists() and journal.stat().st_size > 0, 300)
    process.kill()
    process.join()
    num_starts = len(context.engines.starts())
    _answer(context.spec, context.home, tmp_path / "after", 32)
    assert process.exitcode == -9 and len(context.engines.starts()) == num_starts


def test_the_draft_trains_and_serves(context: StageContext) -> None:
    materialise_baseline(context)
    materialise_vocab_map(context)
    checkpoint = materialise_checkpoint(context).manifest
    assert checkpoint.metrics["steps"] > 0
    evaluation = materialise_evaluation(context).manifest
    assert evaluation.metrics["num_drafts"] > 0
    print({k: round(v, 3) for k, v in evaluation.metrics.items()})
    assert publish_draft(context).promoted
    assert len(context.engines.starts()) == 3, "capturing, plain, drafted"
    assert context.upstream(ids.DRAFT_EVALUATION)


def test_states_of_steps_in_cuda_graphs_match_transformers(context: StageContext) -> None:
    """Steps that only decode are replayed as a whole; rows of others pad them."""
    settings = context.spec.model_dump()
    settings["name"], settings["generation"]["temperature"] = "graphs", 0.5
    settings["resources"]["enforce_eager"] = False
    with_graphs = StageContext(PipelineSpec.model_validate(settings), home=context.home)
    with_graphs.registry.sync(with_graphs.spec)
    materialise_dataset(with_graphs, CHUNK)
    made = materialise_outputs(with_graphs, CHUNK)
    assert made.generations and made.hidden_states
    engine = with_graphs.capturing_engine_spec().engine_id
    assert re.search(r"CUDA graphs \([^)]*FULL", (context.home / "engines" / engine / "engine.log").read_text())
    assert_states_match_transformers(
        Path(context.verifier.path), made.generations.artifact, made.hidden_states.artifact, BF16_TOLERANCE
    )
