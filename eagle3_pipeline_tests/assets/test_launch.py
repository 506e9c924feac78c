"""`eagle3 materialize` and `eagle3 verify`: what is fresh is also what is used; damage and emptiness are told."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from dagster import DagsterRunStatus
from dagster._daemon.types import DaemonHeartbeat
from dagster._utils.interrupts import capture_interrupts

from eagle3_pipeline.assets import launch
from eagle3_pipeline.assets.daemon import ThroughDaemon, daemon_runs
from eagle3_pipeline.assets.runs import count_unfinished, failed_attempts, in_flight
from eagle3_pipeline.assets.work import Work
from eagle3_pipeline.cli import main
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.errors import Eagle3Error, EngineError, StaleInputError
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.store.fingerprint import file_checksum
from eagle3_pipeline_tests.assets.conftest import Pipeline
from eagle3_pipeline_tests.assets.test_graph import FIRST, SECOND
from eagle3_pipeline_tests.store.children import wait_until

# The fake engine's states train nothing.
WITHOUT_TRAINING = launch.Selection((ids.VERIFIER, *ids.CHUNK_STAGES, ids.VOCAB_MAP))


def materialise(pipeline: Pipeline, selection: launch.Selection = WITHOUT_TRAINING) -> launch.Launched:
    spec = pipeline.spec
    runner = launch.InProcess(build_definitions([spec]), pipeline.instance, print)
    return launch.materialise_stale(spec, runner, print, selection)


def answer_length(pipeline: Pipeline, chunk: str) -> float:
    """Supervised tokens of the artifact that the pipeline uses."""
    return pipeline.context.upstream(ids.SYNTHETIC_GENERATIONS, chunk).manifest.metrics["num_supervised_tokens"]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


def test_settings_that_come_back_are_used_again(pipeline: Pipeline) -> None:
    """Six tokens, then three, then six again: the plan is fresh, and what the next stages read must be the six."""
    materialise(pipeline)
    long = answer_length(pipeline, FIRST)
    pipeline.configure(generation={"max_new_tokens": 3})
    materialise(pipeline)
    assert answer_length(pipeline, FIRST) < long
    pipeline.configure()
    assert {row.status.value for row in plan(pipeline.context).rows if row.chunk} == {"fresh"}
    starts = pipeline.num_starts()
    launched = materialise(pipeline)
    assert launched.num_runs > 0
    assert pipeline.num_starts() == starts, "nothing is computed, only pointed to"
    assert answer_length(pipeline, FIRST) == answer_length(pipeline, SECOND) == long
    assert materialise(pipeline).num_runs == 0


def test_a_second_pipeline_shares_what_is_there(pipeline: Pipeline) -> None:
    materialise(pipeline)
    starts = pipeline.num_starts()
    copy = Pipeline(pipeline.home, "copy", pipeline.instance)
    copy.configure(vocab={"draft_vocab_size": 32})
    copy.sync()
    materialise(copy)
    assert copy.num_starts() == starts
    for stage in ids.CHUNK_STAGES:
        assert copy.context.upstream(stage, SECOND).folder == pipeline.context.upstream(stage, SECOND).folder
    assert copy.context.upstream(ids.VOCAB_MAP).manifest.metrics["draft_vocab_size"] == 32


def test_two_passes_load_each_engine_once(pipeline: Pipeline) -> None:
    pipeline.configure(generation={"temperature": 0.7, "one_pass": "never"})
    materialise(pipeline)
    assert pipeline.num_starts() == 2, "one engine generates all chunks, then one captures all"


def test_a_pipeline_without_chunks_starts_no_engine(pipeline: Pipeline) -> None:
    other = Pipeline(pipeline.home, "empty", pipeline.instance)
    with pytest.raises(StaleInputError, match="run eagle3 sync-chunks empty"):
        materialise(other)
    assert other.num_starts() == 0


def test_a_failed_run_is_told_without_a_traceback(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(*_: object) -> None:
        raise ValueError("unforeseen")

    monkeypatch.setattr("eagle3_pipeline.assets.dataset.materialise_dataset", break_down)
    with pytest.raises(Eagle3Error, match="unforeseen") as caught:
        materialise(pipeline)
    assert "Traceback" not in str(caught.value) and "Stack Trace" not in str(caught.value)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest", "folder", "reference"])
def test_verify_finds_every_damage(pipeline: Pipeline, damage: str) -> None:
    pipeline.run_chunk(FIRST)
    assert command("verify", "fake").exit_code == 0
    artifact = pipeline.context.upstream(ids.HIDDEN_STATES, FIRST)
    shard = artifact.folder / "shard-00000.safetensors"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[5000] ^= 1
        shard.write_bytes(data)
    elif damage == "truncate":
        os.truncate(shard, shard.stat().st_size - 10)
    elif damage == "remove":
        (artifact.folder / "index.parquet").unlink()
    elif damage == "manifest":
        (artifact.folder / "manifest.json").write_text("{")
    elif damage == "folder":
        artifact.folder.rename(pipeline.home / "elsewhere")
    else:
        (pipeline.context.references.folder / "hidden_states" / f"{FIRST}.json").write_text("{")
    for _ in range(2):
        result = command("verify", "fake")
        assert result.exit_code == 1
        assert f"hidden_states[{FIRST}]" in result.output
        assert "1 are not" in result.output


def test_a_home_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("EAGLE3_HOME", str(blocked / "home"))
    result = command("home")
    assert result.exit_code == 1
    assert "StoreError: cannot write" in result.output


def test_deep_verification_reads_contents(pipeline: Pipeline) -> None:
    """States of other tokens, and rows of another identity, under checksums that are right."""
    pipeline.run_chunk(FIRST)
    pipeline.run_chunk(SECOND)
    assert command("verify", "fake", "--deep").exit_code == 0
    states = [pipeline.context.upstream(ids.HIDDEN_STATES, chunk) for chunk in (FIRST, SECOND)]
    exchange(states[0].folder, states[1].folder)
    made = pipeline.context.upstream(ids.SYNTHETIC_GENERATIONS, SECOND)
    rows = pq.read_table(made.path("sequences.parquet"))
    turned = rows.take(list(reversed(range(rows.num_rows))))
    pq.write_table(turned, made.path("sequences.parquet"))
    seal(made.folder)
    assert command("verify", "fake").exit_code == 0, "checksums see nothing"
    result = command("verify", "fake", "--deep")
    assert result.exit_code == 1
    assert f"hidden_states[{FIRST}]: chunk {FIRST}: the index holds 4 sequences" in result.output
    assert "sequences.parquet holds rows of content id " in result.output
    # Of verifier and three stages of two chunks; states of either chunk are those of the other.
    assert f"{7 - 2} artifacts are sound, 2 are not" in result.output
    assert pipeline.context.store.get(ids.SYNTHETIC_GENERATIONS, made.manifest.fingerprint) is None, "in quarantine"


def exchange(one: Path, other: Path) -> None:
    """Exchanges the files of two artifacts, and corrects their manifests."""
    for name in ("shard-00000.safetensors", "index.parquet"):
        (one / name).rename(one / "kept")
        (other / name).rename(one / name)
        (one / "kept").rename(other / name)
    for folder in (one, other):
        seal(folder)


def seal(folder: Path) -> None:
    """Writes sizes and checksums of the files that are there into the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        entry |= {"size_bytes": (folder / name).stat().st_size, "xxh3": file_checksum(folder / name)}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_a_selection_runs_only_what_is_selected(pipeline: Pipeline) -> None:
    launched = materialise(pipeline, launch.Selection((ids.DATASET,), "00000[1-9]"))
    assert launched.num_runs == 1
    assert plan(pipeline.context).count()[ids.DATASET] == {"fresh": 1, "missing": 1}
    # What waits for something that is not selected does not run.
    assert materialise(pipeline, launch.Selection((ids.HIDDEN_STATES,))).num_runs == 0
    assert materialise(pipeline, launch.Selection(ids.CHUNK_STAGES, SECOND)).num_runs == 1
    assert [row.chunk for row in plan(pipeline.context).rows if row.chunk and row.status == "fresh"] == [SECOND] * 3


def test_a_dry_run_starts_nothing_and_names_what_would_run(pipeline: Pipeline) -> None:
    pipeline.run("prepare_data", FIRST)
    result = command("materialize", "fake", "--stale", "--stage", "dataset", "--dry-run")
    assert [line.split()[:3] for line in result.output.splitlines()[2:3]] == [["dataset", SECOND, "missing"]]
    assert "1 lines are to be run; nothing was started" in result.output
    assert not (pipeline.home / "dagster_home").exists()
    result = command("materialize", "fake", "--stage", "datasets")
    assert result.exit_code == 1 and "no stage is named 'datasets'; there are: verifier, dataset, " in result.output


def test_materialize_without_a_daemon_runs_here_and_tells_what_is_left(pipeline: Pipeline) -> None:
    result = command("materialize", "fake", "--stage", "dataset", "--stage", "synthetic_generations", "--chunks", FIRST)
    assert result.exit_code == 0, result.output
    assert "fake: dataset, synthetic_generations of chunk 000000" in result.output
    assert "fake: 1 runs, 1 engine starts" in result.output


def test_an_old_heartbeat_is_no_daemon(pipeline: Pipeline) -> None:
    def beat(age_s: float) -> bool:
        heartbeat = DaemonHeartbeat(time.time() - age_s, "QUEUED_RUN_COORDINATOR", "id", [])
        pipeline.instance.add_daemon_heartbeat(heartbeat)
        return daemon_runs(pipeline.instance)

    assert not daemon_runs(pipeline.instance)
    assert beat(5)
    assert not beat(300)


def test_an_engine_that_failed_refuses_the_next_chunk_before_anything_is_read(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading the tokenizer takes a fresh process seconds."""
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
    with pytest.raises(Eagle3Error, match="the fake engine was told not to start"):
        materialise(pipeline, launch.Selection(ids.CHUNK_STAGES, FIRST))

    def never(*_: object) -> None:
        raise AssertionError("the tokenizer was read")

    monkeypatch.setattr("eagle3_pipeline.stages.templates.load_tokenizer", never)
    with pytest.raises(Eagle3Error, match=r"is not started again, it failed before: [\s\S]*was told not to start"):
        materialise(pipeline, launch.Selection(ids.CHUNK_STAGES, SECOND))
    assert pipeline.num_starts() == 1
    assert sorted(failed_attempts(pipeline.instance, pipeline.spec).values()) == [1, 1]
    assert command("engine", "reset").exit_code == 0
    assert list(failed_attempts(pipeline.instance, pipeline.spec).values()) == [1], "the second chunk had no try"


def test_the_log_of_an_engine_that_failed_is_shown_once(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "start")
    result = command("materialize", "fake", "--chunks", "0*")
    assert result.exit_code == 1
    assert "fake: 2 of 2 runs failed; first: " in result.output
    assert all(
        f"hidden_states of chunk {chunk}) failed: the engine tiny " in result.output for chunk in (FIRST, SECOND)
    )
    assert result.output.count("Traceback") == 1
    assert result.output.count("RuntimeError: the fake engine was told not to start") == 1


def test_of_several_failures_each_line_of_a_log_is_shown_once(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_context: object, chunk: str) -> None:
        raise EngineError(f"the engine died; the end of its log:\n  | loading\n  | the cause in {chunk}")

    monkeypatch.setattr("eagle3_pipeline.assets.dataset.materialise_dataset", die)
    output = command("materialize", "fake", "--chunks", "0*").output
    assert [output.count(f"  | {line}\n") for line in ("loading", "the cause in 000000", "the cause in 000001")] == [
        1,
        1,
        1,
    ]


def test_a_run_whose_command_was_killed_is_not_told_as_running(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_LOAD_S", "100")
    arguments = [sys.executable, "-m", "eagle3_pipeline.cli", "materialize", "fake", "--chunks", FIRST]
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: pipeline.num_starts() == 1, 60.0)
            assert command("status").output.endswith("\nruns: 1 started\n")
            with launch.open_instance() as instance:
                assert in_flight(instance, pipeline.spec) == {FIRST}
        finally:
            process.kill()
    assert command("status").output.endswith("\nruns: 1 ended with a killed command\n")
    with launch.open_instance() as instance:
        assert in_flight(instance, pipeline.spec) == set()
        # Dagster gives a run that is executed again the tags of the first one, and another process.
        (killed,) = instance.get_runs()
        job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")
        instance.create_run_for_job(
            job,
            tags=killed.tags,
            status=DagsterRunStatus.STARTED,
            parent_run_id=killed.run_id,
            root_run_id=killed.run_id,
        )
        assert count_unfinished(instance) == {"started": 1, "ended with a killed command": 1}


def test_a_pattern_that_matches_no_chunk_is_an_error(pipeline: Pipeline) -> None:
    result = command("materialize", "fake", "--chunks", "9*")
    assert result.exit_code == 1
    assert "fake: no chunk matches --chunks '9*'; the chunks are 000000 to 000001" in result.output


def test_evaluation_prompts_that_do_not_fit_are_told_before_any_chunk_runs(pipeline: Pipeline) -> None:
    pipeline.configure(evaluation={"max_new_tokens": 95})
    with pytest.raises(Eagle3Error, match=r"exceed generation\.max_sequence_tokens 96"):
        materialise(pipeline, launch.Selection())
    assert pipeline.num_starts() == 0


def test_a_chunk_that_fails_does_not_keep_the_others_from_being_tried(pipeline: Pipeline) -> None:
    pipeline.configure(dataset={"min_yield": 1.0})
    pipeline.write_rows("a.jsonl", ["one", "", "three", "four"])
    pipeline.sync()
    with pytest.raises(Eagle3Error, match=r"1 of 2 runs failed; first: .*chunk 000000") as caught:
        materialise(pipeline, launch.Selection(ids.CHUNK_STAGES))
    assert "Repair or remove the rows, lower dataset.min_yield" in str(caught.value)
    assert {row.chunk for row in plan(pipeline.context).rows if row.status == "fresh" and row.chunk} == {SECOND}


def test_what_waits_is_told_by_the_exit_code(pipeline: Pipeline) -> None:
    result = command("materialize", "fake", "--stage", "hidden_states")
    assert result.exit_code == 1
    assert "fake: 0 runs" in result.output and "not fresh: hidden_states 000000 pending" in result.output


def test_a_daemon_that_died_is_not_waited_for(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3_pipeline.assets.daemon._REPORT_EVERY_S", 0.1)
    job = build_definitions([pipeline.spec]).resolve_job_def("fake__update")
    run = pipeline.instance.create_run_for_job(job, status=DagsterRunStatus.STARTED)
    runner = ThroughDaemon(pipeline.instance, print)
    with pytest.raises(Eagle3Error, match="the Dagster daemon does not live any more; 1 of 1 runs wait for it"):
        runner._wait(pipeline.spec, [run.run_id])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_dagster_forgets_ends_the_runs(pipeline: Pipeline, number: signal.Signals) -> None:
    """Between two steps Dagster takes it and does nothing."""
    runs = []

    class Job:
        def execute_in_process(self, **arguments: object) -> SimpleNamespace:
            runs.append(arguments["partition_key"])
            with capture_interrupts():
                os.kill(os.getpid(), number)
            return SimpleNamespace(success=True)

    definitions = SimpleNamespace(resolve_job_def=lambda _name: Job())
    runner = launch.InProcess(definitions, pipeline.instance, print)  # type: ignore[arg-type]
    work = [Work((ids.DATASET,), chunk, "w") for chunk in (FIRST, SECOND)]
    with pytest.raises(Eagle3Error, match=f"interrupted after dataset of chunk {FIRST}; run it again"):
        runner.run(pipeline.spec, work)
    assert runs == [FIRST]
    assert signal.set_wakeup_fd(-1) == -1


def test_settings_of_the_source_that_changed_since_the_sync_are_told_before_anything_runs(pipeline: Pipeline) -> None:
    materialise(pipeline)
    pipeline.configure(dataset={"tool_turns": "text"})
    with pytest.raises(StaleInputError, match="run eagle3 sync-chunks fake"):
        materialise(pipeline)
    result = command("plan", "fake")
    assert result.exit_code == 0 and "run eagle3 sync-chunks fake" in result.output
    pipeline.sync()
    materialise(pipeline)
