"""`eagle3 gc`: lists exactly what nothing uses, deletes only when told, never the champion's, young or begun work."""

import fcntl
import json
import os
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from eagle3_pipeline.cli import main
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import read_champion
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline_tests.planning.conftest import ContextMaker, fill

TEMPERATURES = (0.0, 0.3, 0.6, 0.9)


@pytest.fixture
def contexts(
    make_context: ContextMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[StageContext, set[Path]]]:
    """The pipeline at four temperatures, one after the other, each with the objects that it added."""
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path / "yaml"))
    (tmp_path / "yaml").mkdir()
    found, before = [], set[Path]()
    for temperature in TEMPERATURES:
        context = make_context(generation={"temperature": temperature})
        fill(context)
        objects = set((tmp_path / "home" / "store" / "objects").glob("*/*/"))
        found.append((context, objects - before))
        before = objects
    write_pipeline(found[-1][0], tmp_path)
    return found


def write_pipeline(context: StageContext, folder: Path) -> None:
    content = context.spec.model_dump(mode="json", exclude={"name"})
    (folder / "yaml" / "p.yaml").write_text(yaml.safe_dump(content))


def gc(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["gc", *arguments], catch_exceptions=False)


def listed(result: Result, home: Path) -> dict[Path, int]:
    """Folders and their bytes, as printed."""
    rows = [
        line.split()
        for line in result.output.splitlines()[2:]
        if line.startswith(("object", "partial", "scratch", "q"))
    ]
    return {home / row[1]: int(row[2].replace(",", "")) for row in rows}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def age(*folders: Path, hours: float = 48) -> None:
    for folder in folders:
        for path in (*folder.rglob("*"), folder):
            os.utime(path, (time.time() - hours * 3600, time.time() - hours * 3600))


def test_after_three_changes_exactly_the_old_objects_are_listed(contexts: list, tmp_path: Path) -> None:
    home = tmp_path / "home"
    champion = read_champion(contexts[0][0].references.folder)
    assert champion
    # All drafts have the same acceptance length, so the first one is the champion still.
    kept = {home / "store/objects" / ids.DRAFT_CHECKPOINT / champion.draft.checkpoint}
    kept |= {home / "store/objects" / ids.DRAFT_EVALUATION / champion.draft.evaluation}
    assert kept <= contexts[0][1]
    # The first temperature also made what no temperature changes: verifier, datasets, baseline.
    shared = {path for path in contexts[0][1] if path.parent.name in (ids.VERIFIER, ids.DATASET, ids.BASELINE)}
    old = (contexts[0][1] - kept - shared) | contexts[1][1] | contexts[2][1]
    result = gc()
    assert listed(result, home) == {folder: size(folder) for folder in old}
    # Three chunks of generations and states, a vocabulary, a checkpoint, an evaluation; the first keeps the last two.
    assert len(old) == 9 * 3 - 2
    assert "younger, kept" in result.output and "0 of them, 0 bytes, are older than 24 h" in result.output
    assert all(folder.exists() for folder in old), "nothing is deleted without --yes"


def test_yes_deletes_what_is_old_and_nothing_else(contexts: list, tmp_path: Path) -> None:
    home = tmp_path / "home"
    old = set(listed(gc(), home))
    young = sorted(old)[0]
    age(*old - {young})
    result = gc("--yes")
    assert f"{len(old) - 1} folders deleted" in result.output
    assert {folder for folder in old if folder.exists()} == {young}
    assert plan(contexts[-1][0]).todo == []
    assert "1 folders deleted" in gc("--yes", "--grace-hours", "0").output
    assert listed(gc(), home) == {}


def test_settings_that_are_not_materialised_yet_do_not_make_what_is_used_garbage(
    contexts: list, tmp_path: Path
) -> None:
    write_pipeline(contexts[0][0], tmp_path)
    found = set(listed(gc(), tmp_path / "home"))
    assert not found & contexts[-1][1], "the pipeline refers to these"
    assert not found & contexts[0][1], "the plan asks for these"
    assert found == contexts[1][1] | contexts[2][1]


def test_a_pipeline_without_a_file_keeps_what_it_refers_to(contexts: list, tmp_path: Path) -> None:
    (tmp_path / "yaml" / "p.yaml").unlink()
    result = gc()
    assert "p: only its references and its champion count, it has no plan" in result.output
    assert not set(listed(result, tmp_path / "home")) & contexts[-1][1]


def test_an_unreadable_reference_stops_everything(contexts: list, tmp_path: Path) -> None:
    path = contexts[-1][0].references.folder / ids.HIDDEN_STATES / "000001.json"
    path.write_text("{")
    result = gc("--yes", "--grace-hours", "0")
    assert result.exit_code == 1
    assert "the reference of p to hidden_states[000001] cannot be read" in result.output
    assert all(folder.exists() for _, folders in contexts for folder in folders)


@pytest.mark.parametrize("stage", [ids.HIDDEN_STATES, ids.DRAFT_CHECKPOINT])
def test_begun_work_is_kept_while_a_plan_asks_for_it(contexts: list, tmp_path: Path, stage: str) -> None:
    home, context = tmp_path / "home", contexts[-1][0]
    chunk = "000001" if stage == ids.HIDDEN_STATES else None
    reference = context.references.get(stage, chunk)
    folder = context.store.object_folder(stage, reference.fingerprint)
    folder.rename(context.store.partial_folder(stage, reference.fingerprint))
    wanted = context.store.partial_folder(stage, reference.fingerprint)
    (context.references.folder / stage / f"{chunk or 'all'}.json").unlink()
    orphan = context.store.partial_folder(stage, "0" * 32)
    scratch = home / "scratch" / stage / ("1" * 32)
    for path in (orphan, scratch):
        path.mkdir(parents=True)
        (path / "journal").write_text("12345")
    before = listed(gc(), home)
    assert before[orphan] == before[scratch] == 5
    assert wanted not in before
    age(orphan, scratch)
    assert "2 folders deleted" in gc("--yes").output
    assert wanted.exists() and not orphan.exists() and not scratch.exists()


def test_what_somebody_writes_just_now_is_not_deleted(contexts: list, tmp_path: Path) -> None:
    orphan = contexts[-1][0].store.partial_folder(ids.HIDDEN_STATES, "0" * 32)
    orphan.mkdir()
    age(orphan)
    with orphan.with_name(f"{'0' * 32}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "0 folders deleted" in gc("--yes").output
    assert "1 folders deleted" in gc("--yes").output


def test_quarantine_is_listed_with_its_bytes(contexts: list, tmp_path: Path) -> None:
    context = contexts[-1][0]
    reference = context.references.get(ids.VOCAB_MAP, None)
    target = context.store.quarantine(context.store.object_folder(ids.VOCAB_MAP, reference.fingerprint), "test")
    assert listed(gc(), tmp_path / "home")[target] == size(target)
    assert json.loads((target / "quarantined.json").read_text())["reason"] == "test"


def test_verify_takes_no_file_of_the_champion_for_a_reference(contexts: list, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["verify", "p"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    # A verifier, three stages of three chunks, four unpartitioned artifacts, and an older champion's checkpoint.
    assert result.output == "15 artifacts are sound, 0 are not\n"
    champion = read_champion(contexts[-1][0].references.folder)
    assert champion
    path = tmp_path / "home/store/objects" / ids.DRAFT_CHECKPOINT / champion.draft.checkpoint / "data.bin"
    path.write_bytes(b"9876543210")
    result = CliRunner().invoke(main, ["verify", "p"])
    assert result.exit_code == 1 and "the champion: draft_checkpoint/" in result.output


def test_what_a_killed_gc_had_begun_to_delete_is_garbage_still(contexts: list, tmp_path: Path) -> None:
    doomed = contexts[-1][0].store.object_folder(ids.HIDDEN_STATES, f".{'0' * 32}.77.doomed")
    doomed.mkdir()
    (doomed / "shard").write_text("12345")
    assert listed(gc(), tmp_path / "home")[doomed] == 5
    age(doomed)
    assert "1 folders deleted" in gc("--yes").output and not doomed.exists()


@pytest.mark.parametrize("hours", ["-5", "nan"])
def test_a_grace_period_is_a_number_of_hours(contexts: list, hours: str) -> None:
    assert CliRunner().invoke(main, ["gc", "--yes", "--grace-hours", hours]).exit_code != 0
    assert listed(gc(), contexts[-1][0].home), "nothing was deleted"
