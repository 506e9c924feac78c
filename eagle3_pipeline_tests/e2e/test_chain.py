"""The whole chain with real vLLM on CPU. Tests of this module run in order and share what they materialise."""

import json

import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.planning import Status, plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs
from eagle3_pipeline_tests.e2e.conftest import Home
from eagle3_pipeline_tests.state_parity import assert_states_match_transformers

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_states_captured_while_generating_match_transformers(home: Home, tiny: PipelineSpec) -> None:
    context = home.context(tiny)
    materialise_dataset(context, "000000")
    made = materialise_outputs(context, "000000")
    assert made.generations and made.hidden_states
    assert made.hidden_states.manifest.metrics["one_pass"] == 1
    assert len(context.engines.starts()) == 1
    assert_states_match_transformers(
        home.path / "models" / "tiny", made.generations.artifact, made.hidden_states.artifact
    )


def test_states_captured_while_sampling_match_transformers(home: Home, tiny: PipelineSpec) -> None:
    """vLLM's capture would verify drafts meanwhile, and on a CPU sample garbage from what it verified."""
    spec = home.write_pipeline("tiny_sampled", generation={"temperature": 0.9})
    home.sync(spec)
    context = home.context(spec)
    materialise_dataset(context, "000000")
    made = materialise_outputs(context, "000000")
    assert made.generations and made.hidden_states
    assert made.hidden_states.manifest.metrics["one_pass"] == 1
    assert len(context.engines.starts()) == 1, "the engine of the generating pipeline is reused"
    assert_states_match_transformers(
        home.path / "models" / "tiny", made.generations.artifact, made.hidden_states.artifact
    )


def test_prefilled_states_match_transformers(home: Home, tiny: PipelineSpec) -> None:
    """The data set's own answers, captured by prefill on the same engine."""
    rows = [
        {"messages": [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "x" * (i + 3)}]}
        for i in range(6)
    ]
    (home.path / "answered.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    spec = home.write_pipeline(
        "tiny_passthrough",
        dataset={"path": "${EAGLE3_HOME}/answered.jsonl"},
        generation={"mode": "passthrough", "max_new_tokens": 24, "max_sequence_tokens": 128},
    )
    home.sync(spec)
    context = home.context(spec)
    materialise_dataset(context, "000000")
    made = materialise_outputs(context, "000000")
    assert made.generations and made.hidden_states
    assert made.hidden_states.manifest.metrics["one_pass"] == 0
    assert len(context.engines.starts()) == 1, "the engine of the generating pipeline is reused"
    assert_states_match_transformers(
        home.path / "models" / "tiny", made.generations.artifact, made.hidden_states.artifact
    )


def test_the_whole_graph_materialises(home: Home, tiny: PipelineSpec) -> None:
    home.materialise(tiny)
    assert plan(home.context(tiny)).todo == []
    context = home.context(tiny)
    assert len(context.engines.starts()) == 3, "one generates and captures, one is timed, one serves the draft"
    evaluation = context.upstream(ids.DRAFT_EVALUATION).manifest
    assert evaluation.metrics["num_drafts"] > 0
    assert evaluation.metrics["num_differences"] == evaluation.metrics["num_near_ties"]
    link = context.references.folder / "published_draft"
    assert (link / "config.json").exists()


def test_a_second_run_starts_nothing(home: Home, tiny: PipelineSpec) -> None:
    before = len(home.context(tiny).engines.starts())
    launched = home.materialise(tiny)
    assert launched.num_runs == 0
    assert len(home.context(tiny).engines.starts()) == before


def test_the_draft_opens_with_speculators_from_its_folder_alone(home: Home, tiny: PipelineSpec) -> None:
    from speculators.models.eagle3 import Eagle3DraftModel

    folder = home.context(tiny).upstream(ids.DRAFT_CHECKPOINT).folder
    model = Eagle3DraftModel.from_pretrained(folder)
    assert tuple(model.lm_head.weight.shape) == (160, 128)
    assert int(model.t2d.sum()) == 160
    config = json.loads((folder / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]


def statuses(home: Home, spec: PipelineSpec) -> dict[str, set[Status]]:
    found: dict[str, set[Status]] = {}
    for row in plan(home.context(spec)).rows:
        found.setdefault(row.stage, set()).add(row.status)
    return found


def stored_bytes(home: Home) -> int:
    return sum(path.stat().st_size for path in (home.path / "store" / "objects").rglob("*") if path.is_file())


def test_a_changed_temperature_makes_the_generations_stale(home: Home, tiny: PipelineSpec) -> None:
    spec = home.write_pipeline("tiny_warm", generation={**_generation(), "temperature": 0.7})
    home.sync(spec)
    result = plan(home.context(spec))
    found = statuses(home, spec)
    assert found[ids.DATASET] == found[ids.VERIFIER] == found[ids.BASELINE] == {Status.FRESH}
    assert found[ids.SYNTHETIC_GENERATIONS] == {Status.STALE}
    for stage in (ids.HIDDEN_STATES, ids.VOCAB_MAP, ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION, ids.PUBLISHED_DRAFT):
        assert found[stage] == {Status.PENDING}
    reasons = {row.reason for row in result.rows if row.stage == ids.SYNTHETIC_GENERATIONS}
    assert reasons == {"generation.temperature 0.0 -> 0.7"}


def test_a_changed_learning_rate_shares_every_shard(home: Home, tiny: PipelineSpec) -> None:
    spec = home.write_pipeline("tiny_fast", training={**_training(), "lr": 1.0e-3})
    home.sync(spec)
    found = statuses(home, spec)
    for stage in (ids.VERIFIER, *ids.CHUNK_STAGES, ids.VOCAB_MAP, ids.BASELINE):
        assert found[stage] == {Status.FRESH}
    assert found[ids.DRAFT_CHECKPOINT] == {Status.STALE}
    assert found[ids.DRAFT_EVALUATION] == found[ids.PUBLISHED_DRAFT] == {Status.PENDING}
    before = stored_bytes(home)
    context = home.context(spec)
    for chunk in context.all_chunks():
        materialise_dataset(context, chunk)
        made = materialise_outputs(context, chunk)
        assert made.generations and made.hidden_states
        assert not made.generations.recomputed and not made.hidden_states.recomputed
    assert stored_bytes(home) == before


def test_a_changed_execution_key_makes_nothing_stale(home: Home, tiny: PipelineSpec) -> None:
    spec = home.write_pipeline("tiny", resources={"num_gpus": 0, "max_num_seqs": 8, "cpu_kvcache_gib": 2.0})
    assert plan(home.context(spec)).todo == []
    home.write_pipeline("tiny")


def _generation() -> dict:
    return {"max_new_tokens": 24, "max_sequence_tokens": 128}


def _training() -> dict:
    from eagle3_pipeline_tests.e2e.conftest import PIPELINE

    return PIPELINE["training"]
