"""Sensors and checks: new chunks, staleness that Dagster cannot see, failures in one line."""

import os
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import StaleStatus

from eagle3_pipeline.assets import sensors
from eagle3_pipeline.assets.checks import UP_TO_DATE, build_up_to_date
from eagle3_pipeline.assets.failures import failure_line
from eagle3_pipeline.assets.sensors import build_new_chunks, build_staleness
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline_tests.assets.conftest import Pipeline
from eagle3_pipeline_tests.assets.test_graph import FIRST, SECOND
from eagle3_pipeline_tests.assets.test_launch import materialise


def tick(pipeline: Pipeline, build: Any, cursor: str | None = None) -> Any:
    """Evaluates a sensor and does what the daemon does with its result."""
    result = build(pipeline.spec)(dg.build_sensor_context(instance=pipeline.instance, cursor=cursor))
    if isinstance(result, dg.SensorResult):
        for request in result.dynamic_partitions_requests or ():
            pipeline.instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
        for event in result.asset_events:
            pipeline.instance.report_runless_asset_event(event)
    return result


def keys(pipeline: Pipeline) -> list[str]:
    return list(pipeline.instance.get_dynamic_partitions(f"{pipeline.name}_chunks"))


def observed(result: Any) -> list[str]:
    return [event.partition for event in result.asset_events]


def test_a_new_file_is_a_new_partition_once(pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine"])
    assert observed(tick(pipeline, build_new_chunks)) == ["000002"]
    assert keys(pipeline) == [FIRST, SECOND, "000002"]
    result = tick(pipeline, build_new_chunks)
    assert result.asset_events == [] and result.skip_reason.skip_message == "3 chunks, nothing new"


def test_a_changed_file_makes_its_chunk_stale_and_moves_no_key(pipeline: Pipeline) -> None:
    pipeline.run_chunk(FIRST)
    pipeline.run_chunk(SECOND)
    pipeline.write_rows("b.jsonl", ["five", "six", "seven", "changed"])
    assert observed(tick(pipeline, build_new_chunks)) == [SECOND]
    assert keys(pipeline) == [FIRST, SECOND]
    assert pipeline.status("dataset", FIRST) is StaleStatus.FRESH
    assert pipeline.status("dataset", SECOND) is StaleStatus.STALE


def test_many_chunks_come_in_batches(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sensors, "_CHUNKS_PER_TICK", 3)
    for number in range(7):
        pipeline.write_rows(f"n{number}.jsonl", [f"row {number}"])
    batches = []
    while batch := observed(tick(pipeline, build_new_chunks)):
        batches.append(batch)
    assert [len(batch) for batch in batches] == [3, 3, 1]
    assert keys(pipeline) == [f"{number:06d}" for number in range(9)]


def test_a_tick_that_was_cut_between_partitions_and_events_is_completed(pipeline: Pipeline) -> None:
    pipeline.write_rows("c.jsonl", ["nine"])
    pipeline.instance.add_dynamic_partitions("fake_chunks", ["000002"])
    result = tick(pipeline, build_new_chunks)
    assert observed(result) == ["000002"] and not result.dynamic_partitions_requests


def test_a_source_that_is_away_changes_nothing(pipeline: Pipeline) -> None:
    data, away = pipeline.home / "data", pipeline.home / "away"
    data.rename(away)
    result = tick(pipeline, build_new_chunks)
    assert "the source cannot be read now, all chunks stay as they are" in result.skip_message
    assert keys(pipeline) == [FIRST, SECOND]
    away.rename(data)
    assert tick(pipeline, build_new_chunks).skip_reason.skip_message == "2 chunks, nothing new"


def evaluation(pipeline: Pipeline, stage: str) -> Any:
    key = dg.AssetCheckKey(dg.AssetKey([pipeline.name, stage]), UP_TO_DATE)
    records: Any = pipeline.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    return records[0].event.dagster_event.asset_check_evaluation_data if records and records[0].event else None


def test_a_stale_vocabulary_says_what_changed(pipeline: Pipeline) -> None:
    assert tick(pipeline, build_staleness).asset_events == [], "nothing was ever materialised"
    materialise(pipeline)
    result = tick(pipeline, build_staleness)
    assert evaluation(pipeline, ids.VOCAB_MAP).passed
    assert isinstance(tick(pipeline, build_staleness, result.cursor), dg.SkipReason)
    pipeline.write_rows("b.jsonl", ["five", "six", "seven", "changed"])
    pipeline.sync()
    result = tick(pipeline, build_staleness, result.cursor)
    found = evaluation(pipeline, ids.VOCAB_MAP)
    assert not found.passed and found.severity is dg.AssetCheckSeverity.WARN
    assert found.description.startswith(
        "waits for synthetic_generations of 1 of 2 chunks; first: dataset[000001]: stale: "
    )
    assert "| dataset " in found.metadata["plan"].value
    # Something else of the plan changes: the table that people see changes, too.
    pipeline.run("prepare_data", SECOND)
    result = tick(pipeline, build_staleness, result.cursor)
    assert "dataset" in str(result.cursor)
    later = evaluation(pipeline, ids.VOCAB_MAP)
    assert later.metadata["plan"].value != found.metadata["plan"].value
    materialise(pipeline)
    tick(pipeline, build_staleness, result.cursor)
    assert evaluation(pipeline, ids.VOCAB_MAP).passed


def test_people_can_run_the_check_themselves(pipeline: Pipeline) -> None:
    materialise(pipeline)
    (check,) = [check for check in build_up_to_date(pipeline.spec) if "vocab_map" in str(check.check_key)]
    from eagle3_pipeline.assets.resources import PipelineHome

    fresh: Any = check(home=PipelineHome())
    assert fresh.passed
    pipeline.configure(vocab={"draft_vocab_size": 32})
    result: Any = build_up_to_date(pipeline.spec)[0](home=PipelineHome())
    assert not result.passed
    assert result.description == "vocab.draft_vocab_size 64 -> 32"


def test_150_chunks_with_one_changed_show_on_the_tail(pipeline: Pipeline) -> None:
    """Dagster itself shows nothing from a hundred upstream partitions on; chunks are seeded by events without runs."""
    for number in range(148):
        pipeline.write_rows(f"n{number:03d}.jsonl", [f"row {number}"])
        os.utime(pipeline.home / "data" / f"n{number:03d}.jsonl", (time.time() - 99, time.time() - 99))
    pipeline.sync()
    assert len(keys(pipeline)) == 150
    seed(pipeline)
    assert evaluation(pipeline, ids.VOCAB_MAP).passed
    assert pipeline.status("vocab_map") is StaleStatus.FRESH
    pipeline.write_rows("n077.jsonl", ["changed"])
    pipeline.sync()
    changed = "000079"
    seed(pipeline, changed)
    assert pipeline.status("vocab_map") is StaleStatus.FRESH, "Dagster sees it now: the check can go"
    tick(pipeline, build_staleness)
    found = evaluation(pipeline, ids.VOCAB_MAP)
    assert not found.passed and f"input token_counts.{changed} " in found.description


def seed(pipeline: Pipeline, only: str | None = None) -> None:
    """Datasets for real; the verifier's outputs small, by hand; one event each."""
    from eagle3_pipeline.stages.dataset import materialise_dataset
    from eagle3_pipeline.stages.vocab_map import materialise_vocab_map
    from eagle3_pipeline_tests.assets.seeding import write_generations

    context = pipeline.context
    for key in [only] if only else context.all_chunks():
        for stage, result in (
            (ids.DATASET, materialise_dataset(context, key)),
            (ids.SYNTHETIC_GENERATIONS, write_generations(context, key)),
        ):
            report(pipeline, stage, result.manifest.content_id, key)
    if not only:
        report(pipeline, ids.VOCAB_MAP, materialise_vocab_map(context).manifest.content_id)
        tick(pipeline, build_staleness)


def report(pipeline: Pipeline, stage: str, version: str, chunk: str | None = None) -> None:
    pipeline.instance.report_runless_asset_event(
        dg.AssetMaterialization(
            asset_key=[pipeline.name, stage], partition=chunk, tags={"dagster/data_version": version}
        )
    )


def test_a_failed_run_is_one_clear_line(pipeline: Pipeline) -> None:
    pipeline.configure(dataset={"min_yield": 1.0})
    pipeline.write_rows("b.jsonl", ["five", ""])
    pipeline.sync()
    result = pipeline.run("prepare_data", SECOND)
    (failure,) = [e for e in result.all_events if e.event_type is dg.DagsterEventType.PIPELINE_FAILURE]
    context = dg.build_run_status_sensor_context(
        sensor_name="report_failures",
        dagster_event=failure,
        dagster_instance=pipeline.instance,
        dagster_run=result.dagster_run,
    ).for_run_failure()
    line = failure_line(context, {"fake", "other"})
    assert line.startswith("fake: chunk 000001 fake__dataset failed: fake: chunk 000001 (")
    assert "dataset.min_yield asks for 100%" in line and line.endswith(f"(run {result.run_id})") and "\n" not in line


def test_definitions_hold_everything_once_and_start_nothing_that_launches(pipeline: Pipeline, tmp_path: Path) -> None:
    from eagle3_pipeline.definitions import build_definitions

    copy = Pipeline(tmp_path, "copy", pipeline.instance)
    repository = build_definitions([pipeline.spec, copy.spec]).get_repository_def()
    running = {s.name for s in repository.sensor_defs if s.default_status is dg.DefaultSensorStatus.RUNNING}
    assert running == {f"{p}__{s}" for p in ("fake", "copy") for s in ("new_chunks", "staleness")} | {"report_failures"}
    assert {s.name: s.default_status for s in repository.schedule_defs} == {
        f"{p}__nightly_retrain": dg.DefaultScheduleStatus.STOPPED for p in ("fake", "copy")
    }
    jobs = {job.name for job in repository.get_all_jobs()}
    assert {f"fake__{j}" for j in ("prepare_data", "generate_and_capture", "train_and_evaluate", "update")} <= jobs
