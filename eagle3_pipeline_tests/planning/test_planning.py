"""Plans: fresh, missing, stale with the key that changed, pending, corrupt."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle3_pipeline.planning import Plan, Status, plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.planning.conftest import ContextMaker, fill, write_source

CHUNKS = ("000000", "000001", "000002")
TAIL = [ids.VOCAB_MAP, ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION, ids.PUBLISHED_DRAFT]
ALL = (
    [(ids.VERIFIER, "")]
    + [(stage, chunk) for stage in (ids.DATASET, ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES) for chunk in CHUNKS]
    + [(ids.VOCAB_MAP, ""), (ids.BASELINE, ""), (ids.DRAFT_CHECKPOINT, ""), (ids.DRAFT_EVALUATION, "")]
    + [(ids.PUBLISHED_DRAFT, "")]
)


def _todo(found: Plan) -> dict[tuple[str, str], tuple[str, str]]:
    return {(row.stage, row.chunk): (row.status.value, row.reason) for row in found.todo}


def _statuses(found: Plan) -> dict[tuple[str, str], str]:
    return {(row.stage, row.chunk): row.status.value for row in found.todo}


def _pending(*stages: tuple[str, str]) -> dict[tuple[str, str], tuple[str, str]]:
    return {(stage, ""): ("pending", f"waits for {upstream}") for stage, upstream in stages}


@pytest.fixture
def filled(make_context: ContextMaker) -> StageContext:
    context = make_context()
    fill(context)
    return context


def test_all_stages_of_a_filled_store_are_fresh_in_the_order_of_the_graph(filled: StageContext) -> None:
    found = plan(filled)
    assert [(row.stage, row.chunk) for row in found.rows] == ALL
    assert found.todo == []


def test_before_anything_is_done_the_tail_waits_for_chunks(make_context: ContextMaker) -> None:
    assert _todo(plan(make_context())) == {
        (ids.VERIFIER, ""): ("missing", "never materialised"),
        (ids.BASELINE, ""): ("missing", "never materialised"),
        **_pending(
            (ids.VOCAB_MAP, "chunks"),
            (ids.DRAFT_CHECKPOINT, ids.VOCAB_MAP),
            (ids.DRAFT_EVALUATION, ids.DRAFT_CHECKPOINT),
            (ids.PUBLISHED_DRAFT, ids.DRAFT_EVALUATION),
        ),
    }


def test_a_new_file_is_one_missing_chunk_and_a_pending_tail(filled: StageContext, source: Path) -> None:
    write_source(source, "c", ["c0"])
    filled.registry.sync(filled.spec)
    assert _todo(plan(filled)) == {
        (ids.DATASET, "000003"): ("missing", "never materialised"),
        (ids.SYNTHETIC_GENERATIONS, "000003"): ("pending", "waits for dataset"),
        (ids.HIDDEN_STATES, "000003"): ("pending", "waits for synthetic_generations"),
        **_pending(
            (ids.VOCAB_MAP, "synthetic_generations of 1 of 4 chunks"),
            (ids.DRAFT_CHECKPOINT, ids.VOCAB_MAP),
            (ids.DRAFT_EVALUATION, ids.DRAFT_CHECKPOINT),
            (ids.PUBLISHED_DRAFT, ids.DRAFT_EVALUATION),
        ),
    }
    fill(filled)
    assert plan(filled).todo == []


def test_a_changed_row_makes_one_chunk_stale(filled: StageContext, source: Path) -> None:
    before = filled.registry.chunk("000001").content_id
    write_source(source, "a", ["a0", "a1", "a2", "changed"])
    filled.registry.sync(filled.spec)
    after = filled.registry.chunk("000001").content_id
    todo = _todo(plan(filled))
    assert todo[ids.DATASET, "000001"] == ("stale", f"input rows {before[:12]}... -> {after[:12]}...")
    assert {chunk for stage, chunk in todo if chunk} == {"000001"}


def test_a_removed_file_leaves_its_chunk_out_and_the_aggregates_stale(filled: StageContext, source: Path) -> None:
    (source / "b.jsonl").unlink()
    filled.registry.sync(filled.spec)
    found = plan(filled)
    assert "000002" not in {row.chunk for row in found.rows}
    todo = _todo(found)
    status, reason = todo[ids.VOCAB_MAP, ""]
    assert status == "stale" and reason.startswith("input token_counts.000002 ") and reason.endswith("-> none")
    assert {stage for stage, _ in todo} == set(TAIL)


def test_a_changed_learning_rate_names_key_old_and_new(filled: StageContext, make_context: ContextMaker) -> None:
    found = plan(make_context(training={"lr": 1e-4}))
    assert _todo(found) == {
        (ids.DRAFT_CHECKPOINT, ""): ("stale", "training.lr 3e-05 -> 0.0001"),
        **_pending((ids.DRAFT_EVALUATION, ids.DRAFT_CHECKPOINT), (ids.PUBLISHED_DRAFT, ids.DRAFT_EVALUATION)),
    }


def test_several_changed_keys_are_all_named(filled: StageContext, make_context: ContextMaker) -> None:
    changed = make_context(training={"noise": {"scale": 0.1}, "patience": 3}, draft={"head_dim": 64})
    assert _todo(plan(changed))[ids.DRAFT_CHECKPOINT, ""] == (
        "stale",
        "draft.head_dim none -> 64; training.noise.scale 0.05 -> 0.1; training.patience none -> 3",
    )


def test_a_changed_temperature_makes_generations_stale_and_what_is_below_wait(
    filled: StageContext, make_context: ContextMaker
) -> None:
    todo = _todo(plan(make_context(generation={"temperature": 0.7})))
    for chunk in CHUNKS:
        assert todo.pop((ids.SYNTHETIC_GENERATIONS, chunk)) == ("stale", "generation.temperature 0.0 -> 0.7")
        assert todo.pop((ids.HIDDEN_STATES, chunk)) == ("pending", "waits for synthetic_generations")
    assert {stage for stage, _ in todo} == set(TAIL)
    assert {status for status, _ in todo.values()} == {"pending"}


def test_other_layers_leave_generations_and_vocabulary_fresh(filled: StageContext, make_context: ContextMaker) -> None:
    todo = _todo(plan(make_context(capture={"aux_layer_ids": [1, 2, 3]})))
    expected = "capture.aux_layer_ids none -> [1, 2, 3]; input layer_ids [2, 6, 9, 12] -> [1, 2, 3, 12]"
    assert {todo[ids.HIDDEN_STATES, chunk] for chunk in CHUNKS} == {("stale", expected)}
    assert todo[ids.BASELINE, ""] == ("stale", expected)
    assert todo[ids.DRAFT_CHECKPOINT, ""] == ("pending", "waits for hidden_states of 3 of 3 chunks")
    assert not {ids.DATASET, ids.SYNTHETIC_GENERATIONS, ids.VOCAB_MAP} & {stage for stage, _ in todo}


def test_other_weights_make_what_reads_the_verifier_stale(
    filled: StageContext, make_context: ContextMaker, model: Path
) -> None:
    save_file({"w": np.zeros(4, dtype=np.float32)}, model / "model.safetensors")
    todo = _todo(plan(make_context()))
    assert todo[ids.VERIFIER, ""][1].startswith("input files ")
    assert todo[ids.SYNTHETIC_GENERATIONS, "000000"][1].startswith("input verifier ")
    assert todo[ids.BASELINE, ""][0] == "stale"
    assert ids.DATASET not in {stage for stage, _ in todo}


@pytest.mark.parametrize(
    "sections",
    [
        {"resources": {"max_num_seqs": 7, "tensor_parallel_size": 4, "enforce_eager": True}},
        {"training": {"num_threads": 1, "attention": "eager"}},
        {"capture": {"max_shard_bytes": 2**20}},
        {"dataset": {"min_yield": 0.9}, "generation": {"min_yield": 0.9, "one_pass": "never"}},
    ],
    ids="+".join,
)
def test_execution_settings_make_nothing_stale(filled: StageContext, make_context: ContextMaker, sections) -> None:
    assert plan(make_context(**sections)).todo == []


def test_a_moved_source_makes_nothing_stale(filled: StageContext, make_context: ContextMaker, tmp_path: Path) -> None:
    (tmp_path / "source").rename(tmp_path / "moved")
    context = make_context(name="moved", dataset={"path": str(tmp_path / "moved" / "*.jsonl")})
    context.registry.sync(context.spec)
    assert _statuses(plan(context)) == {(ids.PUBLISHED_DRAFT, ""): "missing"}


def test_a_copy_of_the_pipeline_under_another_name_shares_all_artifacts(
    filled: StageContext, make_context: ContextMaker
) -> None:
    copy = make_context(name="copy")
    copy.registry.sync(copy.spec)
    assert list(copy.references.places()) == []
    assert _todo(plan(copy)) == {(ids.PUBLISHED_DRAFT, ""): ("missing", "there is no champion yet")}


def test_a_copy_with_another_setting_names_the_difference_to_the_original(
    filled: StageContext, make_context: ContextMaker
) -> None:
    copy = make_context(name="copy", training={"lr": 1e-4})
    copy.registry.sync(copy.spec)
    assert _todo(plan(copy))[ids.DRAFT_CHECKPOINT, ""] == ("stale", "training.lr 3e-05 -> 0.0001")


def test_a_new_format_version_of_a_stage_is_named(filled: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ids.FORMAT_VERSIONS, ids.DRAFT_EVALUATION, 7)
    expected = ("stale", "format version 7 of the stage is new")
    assert _todo(plan(filled))[ids.DRAFT_EVALUATION, ""] == expected


def _artifact_folder(context: StageContext, stage: str, chunk: str | None) -> Path:
    reference = context.references.get(stage, chunk)
    assert reference is not None
    return context.store.object_folder(stage, reference.fingerprint)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_bytes(b"0123"), "data.bin has 4 bytes, expected 10"),
        (lambda path: path.unlink(), "data.bin is missing"),
    ],
    ids=["cut", "missing"],
)
def test_a_damaged_artifact_is_corrupt_and_what_needs_it_waits(filled: StageContext, damage, reason: str) -> None:
    folder = _artifact_folder(filled, ids.HIDDEN_STATES, "000001")
    damage(folder / "data.bin")
    assert _todo(plan(filled)) == {
        (ids.HIDDEN_STATES, "000001"): ("corrupt", reason),
        **_pending(
            (ids.DRAFT_CHECKPOINT, "hidden_states of 1 of 3 chunks"),
            (ids.DRAFT_EVALUATION, ids.DRAFT_CHECKPOINT),
            (ids.PUBLISHED_DRAFT, ids.DRAFT_EVALUATION),
        ),
    }
    assert folder.exists(), "a plan moves nothing"


def test_a_deleted_artifact_is_missing(filled: StageContext) -> None:
    (_artifact_folder(filled, ids.VOCAB_MAP, None) / "manifest.json").unlink()
    todo = _todo(plan(filled))
    assert todo[ids.VOCAB_MAP, ""] == ("missing", "is gone from the store")
    assert todo[ids.DRAFT_CHECKPOINT, ""] == ("pending", "waits for vocab_map")


def test_an_artifact_in_quarantine_is_missing_for_that_reason(filled: StageContext) -> None:
    """Of several times that it was found damaged the last one is told; another artifact's does not count."""
    for reason, chunk in (("first", "000001"), ("last", "000001"), ("other", "000002")):
        folder = _artifact_folder(filled, ids.HIDDEN_STATES, chunk)
        kept = folder.with_suffix(".kept")
        shutil.copytree(folder, kept)
        filled.store.quarantine(folder, reason)
        if reason != "last":
            kept.rename(folder)
    (filled.store.root / "quarantine" / "torn").mkdir()
    (filled.store.root / "quarantine" / "torn" / "quarantined.json").write_text("{")
    assert _todo(plan(filled))[ids.HIDDEN_STATES, "000001"] == (
        "missing",
        "was found damaged and is in quarantine: last",
    )
    assert (ids.HIDDEN_STATES, "000002") not in _todo(plan(filled))


def test_a_partial_folder_is_no_artifact(filled: StageContext) -> None:
    folder = _artifact_folder(filled, ids.BASELINE, None)
    folder.rename(folder.with_name(folder.name + ".partial"))
    todo = _todo(plan(filled))
    assert todo[ids.BASELINE, ""] == ("missing", "is gone from the store")
    assert todo[ids.DRAFT_EVALUATION, ""] == ("pending", "waits for baseline")


def test_a_draft_that_was_not_compared_with_the_champion_is_stale(filled: StageContext) -> None:
    path = filled.references.folder / "champion.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "considered": "another"}))
    expected = ("stale", "the current draft was not compared with the champion")
    assert _todo(plan(filled)) == {(ids.PUBLISHED_DRAFT, ""): expected}


def test_a_plan_writes_nothing(filled: StageContext, make_context: ContextMaker, tmp_path: Path) -> None:
    def snapshot() -> dict[str, tuple[int, int]]:
        paths = (tmp_path / "home").rglob("*")
        return {str(p): (p.lstat().st_ino, p.lstat().st_mtime_ns) for p in paths}

    before = snapshot()
    for context in (filled, make_context(training={"lr": 1.0}), make_context(name="nobody")):
        plan(context)
    assert snapshot() == before


def test_a_plan_is_printed_with_counts_and_the_first_reason(filled: StageContext, make_context: ContextMaker) -> None:
    found = plan(make_context(generation={"top_k": 5}))
    assert found.count()[ids.SYNTHETIC_GENERATIONS] == {"stale": 3}
    assert found.count()[ids.DATASET] == {"fresh": 3}
    lines = {line.split()[0]: line.split() for line in found.table().splitlines()[2:]}
    assert lines[ids.DATASET] == ["dataset", "3"]
    # Nothing was measured: five rows of at most 4096 tokens, 12 bytes each.
    costs = ["<=", "20,480", "<=", "0.2", "?"]
    assert lines[ids.SYNTHETIC_GENERATIONS] == [
        "synthetic_generations",
        "3",
        *costs,
        "generation.top_k",
        "0",
        "->",
        "5",
    ]
    as_json = json.loads(json.dumps(found.to_json()))
    assert as_json["pipeline"] == "p"
    asked = ids.verifier_identity(filled.spec, filled.verifier).fingerprint
    first = {
        "stage": "verifier",
        "chunk": "",
        "status": Status.FRESH,
        "reason": "",
        "linked": True,
        "fingerprint": asked,
    }
    assert as_json["rows"][0] == first
