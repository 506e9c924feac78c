"""Dagster around the fake engine: data versions, staleness, metadata, failures."""

import json
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.definitions.data_version import StaleStatus

from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.planning import Status, new_data_fraction, plan
from eagle3_pipeline.stages.current import current_chunks
from eagle3_pipeline_tests.assets.conftest import Pipeline

FIRST, SECOND = "000000", "000001"
CHUNK_STAGES = ("dataset", "synthetic_generations", "hidden_states")


def metadata(result: dg.ExecuteInProcessResult, stage: str) -> dict:
    for event in result.get_asset_materialization_events():
        if event.asset_key and event.asset_key.path[-1] == stage:
            return {key: value.value for key, value in event.materialization.metadata.items()}
    raise AssertionError(f"{stage} was not materialised")


def failure(result: dg.ExecuteInProcessResult) -> str:
    for event in result.all_events:
        if event.is_step_failure:
            data = event.step_failure_data.user_failure_data
            assert data and data.description
            return data.description
    raise AssertionError("no step failed")


def test_keys_groups_and_dependencies_are_those_of_the_design(pipeline: Pipeline) -> None:
    graph = build_definitions([pipeline.spec]).resolve_asset_graph()
    found = {
        key.path[-1]: {parent.path[-1] for parent in graph.get(key).parent_keys} for key in graph.get_all_asset_keys()
    }
    assert found == {
        "source_rows": set(),
        "verifier": set(),
        "dataset": {"source_rows"},
        "synthetic_generations": {"dataset", "verifier"},
        "hidden_states": {"synthetic_generations", "verifier"},
        "vocab_map": {"synthetic_generations", "verifier"},
        "baseline": {"verifier"},
        "draft_checkpoint": {"synthetic_generations", "hidden_states", "vocab_map"},
        "draft_evaluation": {"draft_checkpoint", "baseline"},
        "published_draft": {"draft_evaluation"},
    }
    assert {graph.get(key).group_name for key in graph.get_all_asset_keys()} == {"fake"}


def test_both_outputs_come_from_one_run_with_their_metadata(pipeline: Pipeline) -> None:
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert result.success
    generations, states = metadata(result, "synthetic_generations"), metadata(result, "hidden_states")
    # Four prompts, six new tokens each; nothing in the fake's answers is rejected.
    assert generations["num_sequences"] == 4
    assert generations["num_supervised_tokens"] <= 4 * 6
    assert generations["num_rejected"] == 0
    assert states["num_tokens"] == generations["num_tokens"] - 4, "the last sampled token of a sequence has no state"
    assert states["one_pass"] == 1
    # 4 layers x 128 x 2 bytes a row, an int32 token id, and the reserved header.
    assert states["hidden_states_bytes"] == states["num_tokens"] * (4 * 128 * 2 + 4) + 4096
    checks = {e.check_name: e.passed for e in result.get_asset_check_evaluations()}
    assert checks == {"has_supervised_tokens": True, "states_are_finite": True}


def test_data_versions_are_content_ids(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    for stage in CHUNK_STAGES:
        manifest = pipeline.context.upstream(stage, FIRST).manifest
        records = pipeline.instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey(["fake", stage]), asset_partitions=[FIRST]), limit=1
        ).records
        materialisation = records[0].asset_materialization
        assert materialisation and materialisation.tags
        assert materialisation.tags["dagster/data_version"] == manifest.content_id
        assert pipeline.status(stage, FIRST) == StaleStatus.FRESH


def test_an_untouched_rerun_starts_no_engine(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    pipeline.context.engines.stop_all(print)
    assert pipeline.num_starts() == 1
    pipeline.run_chunk(FIRST)
    assert pipeline.num_starts() == 1
    assert metadata(pipeline.run("generate_and_capture", FIRST), "hidden_states")["recomputed"] is False


def test_two_chunks_share_one_engine(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    pipeline.run_chunk(SECOND)
    assert pipeline.num_starts() == 1


def test_a_changed_file_makes_exactly_its_chunk_stale(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    pipeline.run_chunk(SECOND)
    pipeline.write_rows("b.jsonl", ["five", "six", "seven", "changed"])
    pipeline.sync()
    assert pipeline.status("dataset", FIRST) == StaleStatus.FRESH
    assert pipeline.status("dataset", SECOND) == StaleStatus.STALE
    assert pipeline.run("prepare_data", SECOND).success
    assert pipeline.status("dataset", SECOND) == StaleStatus.FRESH
    assert pipeline.status("synthetic_generations", SECOND) == StaleStatus.STALE
    assert pipeline.status("synthetic_generations", FIRST) == StaleStatus.FRESH


def test_an_equal_rerun_leaves_what_is_below_fresh(pipeline: Pipeline) -> None:
    """Another order of keys in the source's JSON changes the file, not the conversations."""
    pipeline.run_chunk(FIRST)
    rows = ["one", "two", "three", "four"]
    text = "".join(json.dumps({"id": i, "prompt": prompt}) + "\n" for i, prompt in enumerate(rows))
    (pipeline.home / "data" / "a.jsonl").write_text(text)
    pipeline.sync()
    assert pipeline.status("dataset", FIRST) == StaleStatus.STALE
    assert pipeline.run("prepare_data", FIRST).success
    assert pipeline.status("synthetic_generations", FIRST) == StaleStatus.FRESH


def test_a_semantic_key_changes_the_code_version_and_an_execution_key_does_not(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    pipeline.configure(resources={"max_num_seqs": 4, "cpu_kvcache_gib": 2.0})
    assert all(pipeline.status(stage, FIRST) == StaleStatus.FRESH for stage in CHUNK_STAGES)
    pipeline.configure(generation={"temperature": 0.5})
    assert pipeline.status("dataset", FIRST) == StaleStatus.FRESH
    assert pipeline.status("synthetic_generations", FIRST) == StaleStatus.STALE


def test_only_missing_states_are_prefilled(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    before = pipeline.context.upstream("synthetic_generations", FIRST).manifest
    pipeline.configure(capture={"aux_layer_ids": [1, 4, 5]})
    result = pipeline.run("generate_and_capture", FIRST, "hidden_states")
    assert result.success
    assert metadata(result, "hidden_states")["one_pass"] == 0
    assert pipeline.context.upstream("synthetic_generations", FIRST).manifest == before


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("start", ["did not start", "the fake engine was told not to start"]),
        ("write_error", ["cannot write the hidden states", "Errno 5"]),
        ("disk_full", ["cannot write the hidden states", "Errno 28"]),
        ("short_capture", ["rows of hidden states were captured, expected"]),
    ],
)
def test_a_failing_engine_fails_the_run_and_publishes_nothing(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, kind: str, words: list[str]
) -> None:
    assert pipeline.run("prepare_data", FIRST).success
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", kind)
    result = pipeline.run("generate_and_capture", FIRST)
    assert not result.success
    description = failure(result)
    for word in words:
        assert word in description
    assert published(pipeline.home, "synthetic_generations") == published(pipeline.home, "hidden_states") == []


def published(home: Path, stage: str) -> list[Path]:
    return list((home / "store" / "objects" / stage).glob("*/manifest.json"))


def test_a_failed_chunk_continues_after_the_cause_is_gone(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipeline.run("prepare_data", FIRST).success
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "write_error")
    assert not pipeline.run("generate_and_capture", FIRST).success
    pipeline.context.engines.stop_all(print)
    monkeypatch.delenv("EAGLE3_FAKE_FAIL")
    assert pipeline.run("generate_and_capture", FIRST).success


def test_an_unknown_chunk_and_a_missing_upstream_are_named(pipeline: Pipeline) -> None:
    result = pipeline.run("generate_and_capture", FIRST)
    assert "dataset[000000] is not materialised" in failure(result)


def test_an_edited_source_asks_for_a_sync(pipeline: Pipeline) -> None:
    pipeline.write_rows("a.jsonl", ["one", "two", "three", "other"])
    result = pipeline.run("prepare_data", FIRST)
    assert "run eagle3 sync-chunks" in failure(result)


def test_too_few_usable_rows_fail_with_the_reasons(pipeline: Pipeline) -> None:
    (pipeline.home / "data" / "a.jsonl").write_text('{"prompt": "one"}\nnot json\n{"other": 1}\n{"prompt": ""}\n')
    pipeline.sync()
    result = pipeline.run("prepare_data", FIRST)
    description = failure(result)
    for word in ("1 of 4 rows are usable", "bad_json 1", "wrong_shape 1", "empty 1"):
        assert word in description


def test_the_vocabulary_waits_for_all_chunks(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    result = pipeline.run("train_and_evaluate", None, "vocab_map")
    assert "synthetic_generations of 1 of 2 chunks is not materialised" in failure(result)
    assert "first: 000001; materialise them first, or lower schedule.min_fresh_fraction (1)" in failure(result)
    pipeline.run_chunk(SECOND)
    result = pipeline.run("train_and_evaluate", None, "vocab_map")
    assert result.success
    assert metadata(result, "vocab_map")["draft_vocab_size"] == 64


def test_a_chunk_without_a_usable_row_asks_for_nothing_and_stops_nothing(pipeline: Pipeline) -> None:
    (pipeline.home / "data" / "c.jsonl").write_text("id,prompt\n1,ask\n")
    pipeline.configure(dataset={"min_yield": 0.0})
    pipeline.sync()
    for chunk in (FIRST, SECOND, "000002"):
        pipeline.run_chunk(chunk)
    stages: dict[str, set[str]] = {row.chunk: set() for row in plan(pipeline.context).rows}
    for row in plan(pipeline.context).rows:
        if row.chunk:
            assert row.status is Status.FRESH, row
            stages[row.chunk].add(row.stage)
    assert stages[FIRST] == stages[SECOND] == set(CHUNK_STAGES)
    assert stages["000002"] == {"dataset"}
    # The unpartitioned stages do not wait for it.
    assert pipeline.run("train_and_evaluate", None, "vocab_map").success
    assert set(current_chunks(pipeline.context).hidden_states) == {FIRST, SECOND}
    assert new_data_fraction(pipeline.context, plan(pipeline.context)) is None
