"""Promotion: margin, floor by category, pins, history, the folder that people serve and its card."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from eagle3_pipeline.cli import main
from eagle3_pipeline.errors import StoreError
from eagle3_pipeline.planning import Status, plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import read_champion, read_history
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.published_draft import LINK, publish_draft
from eagle3_pipeline_tests.planning.conftest import ContextMaker, fill


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EAGLE3_PIPELINES", str(tmp_path / "yaml"))
    (tmp_path / "yaml").mkdir()


def promote(context: StageContext, *arguments: str) -> Result:
    content = context.spec.model_dump(mode="json", exclude={"name"})
    folder = context.home.parent / "yaml"
    (folder / "p.yaml").write_text(yaml.safe_dump(content))
    return CliRunner().invoke(main, ["promote", "p", *arguments])


@dataclass(frozen=True)
class Draft:
    """A draft of the pipeline, which has gone on to others since."""

    context: StageContext
    checkpoint: str

    @property
    def draft_id(self) -> str:
        return self.checkpoint[:12]


def draft(make: ContextMaker, epochs: int, lengths: dict[str, float] | float, **publish: Any) -> Draft:
    """Another draft, trained for so many epochs, with these acceptance lengths; the decision about it is taken."""
    context = make(training={"epochs": epochs}, publish=publish)
    fill(context, lengths if isinstance(lengths, dict) else {"chat": lengths})
    return Draft(context, context.upstream(ids.DRAFT_CHECKPOINT).manifest.fingerprint)


def served(found: Draft) -> str:
    """The checkpoint behind the folder that people serve."""
    return (found.context.references.folder / LINK / "data.bin").resolve().parent.name


def test_only_a_better_draft_is_promoted_and_a_worse_one_touches_nothing(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, 2.0)
    assert served(first) == first.checkpoint
    folder = first.context.references.folder / LINK
    before = {path.name: path.lstat().st_mtime_ns for path in folder.resolve().iterdir()}
    worse = draft(make_context, 2, 1.9)
    assert worse.checkpoint != first.checkpoint
    assert served(worse) == first.checkpoint
    assert {path.name: path.lstat().st_mtime_ns for path in folder.resolve().iterdir()} == before
    champion = read_champion(worse.context.references.folder)
    assert champion and champion.reason.startswith("not promoted: acceptance length 1.900 against the champion's 2.000")
    assert plan(worse.context).todo == [], "the decision was taken: the next plan has nothing to do"
    better = draft(make_context, 3, 2.1)
    assert served(better) == better.checkpoint
    assert plan(better.context).todo == []
    assert [one.draft.checkpoint for one in read_history(better.context.references.folder)] == [
        first.checkpoint,
        better.checkpoint,
    ]


def test_a_margin_must_be_exceeded(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, 2.0)
    assert served(draft(make_context, 2, 2.25, min_improvement=0.25)) == first.checkpoint
    assert served(draft(make_context, 3, 2.26, min_improvement=0.25)) != first.checkpoint


def test_a_category_must_not_fall_behind(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, {"chat": 2.0, "code": 3.0})
    lengths = {"chat": 4.0, "code": 2.8}
    held = draft(make_context, 2, lengths, max_category_drop=0.1)
    assert served(held) == first.checkpoint
    champion = read_champion(held.context.references.folder)
    assert champion and "but 2.800 against 3.000 in category code; publish.max_category_drop is 0.1" in champion.reason
    assert served(draft(make_context, 3, lengths, max_category_drop=0.25)) != first.checkpoint


def test_going_back_pins_until_it_is_undone(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, 2.0)
    second = draft(make_context, 2, 2.5)
    old = first.draft_id
    result = promote(second.context, "--to", old[:6])
    assert result.exit_code == 0, result.output
    assert f"champion: {old}, pinned: pinned by hand" in result.output
    assert served(second) == first.checkpoint
    assert plan(second.context).todo == [], "no night undoes it"
    third = draft(make_context, 3, 9.0)
    assert served(third) == first.checkpoint
    champion = read_champion(third.context.references.folder)
    assert champion and f"the champion {old} is pinned" in champion.reason
    assert f"champion: {old}: not pinned any more" in promote(third.context, "--unpin").output
    # What was turned down meanwhile is compared again.
    assert [(row.stage, row.status) for row in plan(third.context).todo] == [(ids.PUBLISHED_DRAFT, Status.STALE)]
    assert publish_draft(third.context).promoted
    assert served(third) == third.checkpoint


def test_the_current_draft_can_be_promoted_by_hand(make_context: ContextMaker) -> None:
    draft(make_context, 1, 2.0)
    worse = draft(make_context, 2, 1.0)
    assert promote(worse.context, "--to", worse.draft_id).exit_code == 0
    assert served(worse) == worse.checkpoint


def test_an_unknown_draft_is_named_with_those_there_are(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, 2.0)
    result = promote(first.context, "--to", "zzzz")
    assert result.exit_code == 1
    assert f"p: 0 drafts match 'zzzz'; there are: {first.draft_id}" in result.output
    assert promote(first.context, "--to", "a", "--unpin").exit_code == 1


def test_a_champion_whose_files_are_gone_cannot_come_back(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, 2.0)
    second = draft(make_context, 2, 2.5)
    folder = first.context.store.object_folder(ids.DRAFT_CHECKPOINT, first.checkpoint)
    folder.rename(folder.with_name("elsewhere"))
    result = promote(second.context, "--to", first.draft_id)
    assert result.exit_code == 1 and "StoreError: no artifact draft_checkpoint/" in result.output
    assert served(second) == second.checkpoint


def test_a_damaged_record_is_an_error_not_another_champion(make_context: ContextMaker) -> None:
    context = draft(make_context, 1, 2.0).context
    (context.references.folder / "champion.json").write_text("{")
    with pytest.raises(StoreError, match=r"champion\.json cannot be read"):
        publish_draft(context)


def test_the_card_says_what_the_draft_is(make_context: ContextMaker) -> None:
    draft(make_context, 1, {"chat": 2.0, "code": 3.0})
    second = draft(make_context, 2, {"chat": 2.5, "code": 3.0})
    context = second.context
    folder = context.references.folder / LINK
    card = (folder / "README.md").read_text()
    front, body = card.split("---\n")[1:3]
    assert yaml.safe_load(front) == {
        "base_model": context.spec.verifier.model,
        "library_name": "speculators",
        "tags": ["speculative-decoding", "eagle3"],
    }
    lines = [line.replace(" ", "") for line in body.splitlines()]
    # Five rows in three chunks, 75 % coverage as written by hand, the champion before at 2.0 in chat.
    for expected in ("|chunks|3|", "|sourcerowsread|5|", "|conversationsused|5|"):
        assert expected in lines
    assert "|supervisedtokensinthedraftvocabulary|75.00%|" in lines
    assert "|chat|2.000|2.500|" in lines and "|all|2.500|2.750|" in lines
    assert "|training.epochs|2|" in lines
    assert f"|draft_checkpoint|{second.checkpoint}|" in lines
    assert "vllm serve " in body and '"num_speculative_tokens": 3' in body
    provenance = json.loads((folder / "provenance.json").read_text())
    for stage in ids.CHUNK_STAGES:
        expected_prints = {key: context.upstream(stage, key).manifest.fingerprint for key in context.all_chunks()}
        assert provenance["chunks"][stage] == expected_prints
    # What people serve are the checkpoint's own files.
    names = set(context.upstream(ids.DRAFT_CHECKPOINT).manifest.files)
    assert {path.name for path in folder.iterdir()} == names | {"README.md", "provenance.json"}


@pytest.mark.parametrize("damage", ["gone", "link", "file", "card"])
def test_a_served_folder_that_is_lost_is_told_and_written_again(make_context: ContextMaker, damage: str) -> None:
    first = draft(make_context, 1, 2.0)
    folder = first.context.references.folder / LINK
    if damage == "gone":
        shutil.rmtree(folder.resolve())
    elif damage == "link":
        folder.unlink()
    elif damage == "file":
        (folder / "data.bin").unlink()
        (folder / "data.bin").write_text("another model")
    else:
        (folder / "README.md").unlink()
    (row,) = plan(first.context).todo
    assert (row.stage, row.status) == (ids.PUBLISHED_DRAFT, Status.CORRUPT)
    promote(first.context)
    assert CliRunner().invoke(main, ["verify", "p"]).exit_code == 1
    # Whether the next draft wins or not, what people serve is there again.
    worse = draft(make_context, 2, 1.0)
    assert served(worse) == first.checkpoint
    assert (folder / "README.md").read_text().startswith("---")
    assert plan(worse.context).todo == []
    assert CliRunner().invoke(main, ["verify", "p"]).exit_code == 0


@pytest.mark.parametrize("damage", ['{"a": [', "\x00\x01", "[]"])
def test_a_damaged_history_stops_gc_and_a_lost_one_loses_no_draft(make_context: ContextMaker, damage: str) -> None:
    first, second = draft(make_context, 1, 2.0), draft(make_context, 2, 2.5)
    promote(second.context)
    path = second.context.references.folder / "champions.jsonl"
    path.write_text(damage + "\n" + path.read_text())
    result = CliRunner().invoke(main, ["gc", "--grace-hours", "0", "--yes"])
    assert result.exit_code == 1 and "champions.jsonl cannot be read" in result.output
    path.unlink()
    assert CliRunner().invoke(main, ["gc", "--grace-hours", "0", "--yes"]).exit_code == 0
    assert first.context.store.object_folder(ids.DRAFT_CHECKPOINT, first.checkpoint).exists()


def test_the_present_champion_is_not_compared_with_itself(make_context: ContextMaker) -> None:
    first = draft(make_context, 1, 2.0)
    promote(first.context, "--to", first.draft_id)
    assert "Against the champion before" not in (first.context.references.folder / LINK / "README.md").read_text()
    for short in ("", "abc"):
        assert "characters of a draft's id" in promote(first.context, "--to", short).output
