"""The reckoned costs of the reference pipeline, against numbers worked out by hand."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from eagle3_pipeline.cli import main
from eagle3_pipeline.config import PipelineSpec, find_pipeline
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.planning import plan
from eagle3_pipeline.planning.outlook import outlook, row_bytes, tokens_per_sample
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline_tests.planning.conftest import ContextMaker


@pytest.fixture
def kimi(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> PipelineSpec:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("EAGLE3_PIPELINES", raising=False)
    return find_pipeline("kimi_k25")


def test_the_reference_run_of_kimi(kimi: PipelineSpec) -> None:
    """Measured there: 503,000 tokens, 27 GiB of states, 22.5 min to load, 2.9 min to capture, at 2,912 tok/s."""
    assert row_bytes(kimi, None) == (4 * 7168 * 2, 4, 7168) == (57_344, 4, 7168)
    found = outlook(kimi, 1000, 503_000, 57_344)
    assert found.hidden_states_bytes == 28_844_032_000
    assert found.load_s == 22.5 * 60
    assert found.capture_s == pytest.approx(172.7, abs=0.1)
    # 303 of the 503 tokens are sampled, at 1,500 a second: 202 s; ten epochs at 3,018 a second: 1,667 s of one GPU.
    assert found.generation_s == pytest.approx(202)
    assert found.training_s == pytest.approx(5_030_000 / 3018)
    assert found.gpu_hours == pytest.approx((8 * (3 * 1350 + 202) + 1666.7) / 3600, rel=1e-4)


def test_answers_of_the_data_set_are_captured_in_a_pass_of_their_own(kimi: PipelineSpec) -> None:
    spec = kimi.model_copy(update={"generation": kimi.generation.model_copy(update={"mode": "passthrough"})})
    found = outlook(spec, 1000, 503_000, 57_344)
    assert found.generation_s == 0
    assert found.gpu_hours == pytest.approx((8 * (3 * 1350 + 172.73) + 1666.67) / 3600, rel=1e-4)


def test_what_is_not_assumed_is_not_reckoned(kimi: PipelineSpec) -> None:
    spec = kimi.model_copy(update={"assumptions": kimi.assumptions.model_copy(update={"load_s": None})})
    found = outlook(spec, 1000, 503_000, 57_344)
    assert found.load_s is None and found.gpu_hours is None and found.hidden_states_bytes == 28_844_032_000


def test_a_sample_is_as_long_as_its_token_budget_unless_said_otherwise(kimi: PipelineSpec) -> None:
    assert tokens_per_sample(kimi) == 200 + 4096
    short = kimi.model_copy(update={"generation": kimi.generation.model_copy(update={"max_sequence_tokens": 4200})})
    assert tokens_per_sample(short) == 4200


def test_the_command_prints_the_reference_run(kimi: PipelineSpec) -> None:
    result = CliRunner().invoke(main, ["plan", "kimi_k25", "--samples", "1000", "--tokens-per-sample", "503"])
    assert result.exit_code == 0
    for text in (
        "28.8 GB (26.9 GiB)",
        "57,344 B per token with 4 layers",
        "load on 8 GPUs 22.5 min",
        "capture at 2,912 tok/s * 2.9 min",
    ):
        assert text in " ".join(result.output.split()), result.output


def test_without_the_verifier_the_plan_prints_the_sizes_of_the_file_and_says_what_it_lacks(kimi: PipelineSpec) -> None:
    result = CliRunner().invoke(main, ["plan", "kimi_k25"])
    assert result.exit_code == 1
    assert "1,000 samples" in result.output and "1,400,000 samples" in result.output
    # 1,400,000 x 4,296 x 57,344 B
    assert "344.9 TB (313.7 TiB)" in result.output
    assert "'moonshotai/Kimi-K2.5' is not in this machine's Hugging Face cache" in result.output


def test_an_unknown_size_must_be_stated(kimi: PipelineSpec) -> None:
    spec = kimi.model_copy(update={"assumptions": kimi.assumptions.model_copy(update={"hidden_size": None})})
    with pytest.raises(
        ConfigError, match=r"kimi_k25: .*not on this machine; state its size as assumptions\.hidden_size"
    ):
        row_bytes(spec, None)


def test_a_verifier_that_is_here_says_its_size_itself(make_context: ContextMaker) -> None:
    context = make_context(assumptions={"hidden_size": 999})
    assert row_bytes(context.spec, context.verifier) == (4 * 8 * 2, 4, 8)


def test_assumed_speeds_stand_in_until_something_is_measured(make_context: ContextMaker) -> None:
    speeds = {"generation_tokens_per_s": 100, "capture_tokens_per_s": 200, "training_tokens_per_s": 50}
    context = make_context(assumptions=speeds, generation={"max_sequence_tokens": 120, "max_new_tokens": 50})
    context.registry.sync(context.spec)
    found = plan(context).estimates
    # Five rows of at most 120 tokens; ten epochs.
    assert found[ids.DRAFT_CHECKPOINT].device_minutes == pytest.approx(600 * 10 / 50 / 60)
    assert json.loads(json.dumps(plan(context).to_json()))["estimates"][ids.DRAFT_CHECKPOINT]["at_most"]


def test_json_of_an_outlook(kimi: PipelineSpec) -> None:
    result = CliRunner().invoke(main, ["plan", "kimi_k25", "--samples", "7", "--tokens-per-sample", "503", "--json"])
    (found,) = json.loads(result.output)
    assert (found["num_samples"], found["num_tokens"], found["hidden_states_bytes"]) == (7, 3521, 3521 * 57_344)


def test_a_verifier_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost.yaml").write_text("verifier: {model: /no/such/model}\ndataset: {path: x}\n")
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path))
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    result = CliRunner().invoke(main, ["plan", "lost", "--samples", "7"])
    assert result.exit_code == 1 and "there is no folder /no/such/model" in result.output
