"""Verifiers with recurrent layers through the graph with real vLLM on CPU; answers against Transformers in float32.

vLLM lays out their state for the drafted token of its capture, so an engine that decodes without drafts answers
garbage, believes it, and captures states that agree with it.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.errors import DecodingError
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES, materialise_outputs
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline_tests.e2e.conftest import WORDS, Home, open_home
from eagle3_pipeline_tests.families.builders import make_family
from eagle3_pipeline_tests.state_parity import load_reference
from eagle3_pipeline_tests.wrong_corrections import WRONG_BACKEND

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
CHUNK = "000000"
DRAFT = {"rope_theta": 10000.0, "head_dim": 64, "intermediate_size": 256}
# vLLM's kernels for gated delta nets on CPUs compute in bf16 only.
DTYPES = {"qwen3_next": "bfloat16", "nemotron_h_dense": "float32"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with open_home(tmp_path_factory.mktemp("recurrent")) as made:
        for kind in DTYPES:
            make_family(kind, made.path / "models" / kind)
        rows = [{"prompt": f"tell {a} of {b}"} for a in WORDS[:3] for b in WORDS[:4]]
        (made.path / "data" / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        prompts = [{"category": "first", "prompt": f"first {word}"} for word in WORDS[:3]]
        (made.path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
        yield made


def _pipeline(home: Home, name: str, kind: str, new_tokens: int = 24) -> PipelineSpec:
    model = {"model": f"${{EAGLE3_HOME}}/models/{kind}", "dtype": DTYPES[kind]}
    spec = home.write_pipeline(
        name,
        verifier=model,
        # Other lengths are other work: what one pipeline made another one would only point to.
        generation={"max_new_tokens": new_tokens},
        draft=DRAFT,
        vocab={"draft_vocab_size": 200, "min_coverage": 0.0},
        # In bf16 rounding sends tokens of a random model to other experts: decoded and prefilled rows differ by more.
        capture={"min_next_token_agreement": 0.7},
    )
    home.sync(spec)
    return spec


def _deficits(context: StageContext) -> np.ndarray:
    """Of each sampled token, how far below the best its log-probability lies by Transformers in float32."""
    import torch

    model = load_reference(Path(context.verifier.path)).eval()
    found = []
    for row in pq.read_table(context.upstream(ids.SYNTHETIC_GENERATIONS, CHUNK).path(SEQUENCES)).to_pylist():
        tokens, start = row["input_ids"], row["num_prompt_tokens"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
        log_p = torch.log_softmax(logits, -1)
        found += [float(log_p[i - 1].max() - log_p[i - 1, tokens[i]]) for i in range(start, len(tokens))]
    return np.asarray(found)


def _states(context: StageContext) -> Manifest:
    return context.upstream(ids.HIDDEN_STATES, CHUNK).manifest


def _prepared(home: Home, name: str, kind: str = "qwen3_next", new_tokens: int = 24) -> StageContext:
    context = home.context(_pipeline(home, name, kind, new_tokens))
    materialise_dataset(context, CHUNK)
    return context


def test_a_verifier_with_gated_delta_nets_gets_a_draft(home: Home) -> None:
    """In one pass, as vLLM itself captures."""
    spec = _pipeline(home, "qwen3_next", "qwen3_next")
    home.materialise(spec)
    context = home.context(spec)
    assert plan(context).todo == []
    # In bf16 a random model with experts leaves the argmax of float32 now and then; garbage lies 3 to 5 below it.
    assert _deficits(context).mean() < 1.0
    metrics = _states(context).metrics
    assert metrics["one_pass"] == 1
    assert abs(metrics["teacher_kl"]) < 0.03
    assert context.upstream(ids.DRAFT_EVALUATION).manifest.metrics["num_drafts"] > 0


def test_where_no_way_of_capturing_decodes_rightly_states_come_from_a_prefill(home: Home) -> None:
    """Mamba layers on the CPU: vLLM's own capture decodes wrongly as well."""
    context = _prepared(home, "nemotron", "nemotron_h_dense")
    made = materialise_outputs(context, CHUNK)
    assert made.hidden_states and made.hidden_states.manifest.metrics["one_pass"] == 0
    assert _deficits(context).mean() < 0.01
    assert abs(_states(context).metrics["teacher_kl"]) < 0.03


def test_the_smoke_test_finds_a_correction_that_does_not_hold(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", WRONG_BACKEND)
    context = _prepared(home, "smoked", new_tokens=23)
    made = materialise_outputs(context, CHUNK)
    assert made.hidden_states and made.hidden_states.manifest.metrics["one_pass"] == 0
    assert (
        "decoded tokens differ by more than"
        in context.engines.last_smoke(context.capturing_engine_spec())["decoding_fault"]
    )
    assert _deficits(context).mean() < 1.0


def test_so_does_the_check_of_a_chunk_and_its_answers_are_taken_back(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", WRONG_BACKEND)
    monkeypatch.setenv("EAGLE3_TEST_NO_SMOKE", "1")
    context = _prepared(home, "unsmoked", new_tokens=22)
    context.engines.stop_all(print)
    # What the test before left.
    (context.engines.folder / context.capturing_engine_spec().engine_id / "smoke.json").unlink(missing_ok=True)
    with pytest.raises(DecodingError, match="of answers"):
        materialise_outputs(context, CHUNK)
    reference = context.references.get(ids.SYNTHETIC_GENERATIONS, CHUNK)
    assert reference and context.store.get(ids.SYNTHETIC_GENERATIONS, reference.fingerprint) is None
    made = materialise_outputs(context, CHUNK)
    assert made.hidden_states and made.hidden_states.manifest.metrics["one_pass"] == 0
    assert _deficits(context).mean() < 1.0
