"""The dataset stage on small sources: what it filters, what it depends on, what it says."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.conversations import CONTENT_COLUMNS, CONVERSATION_SCHEMA
from eagle3_pipeline.data.decontamination import Decontamination
from eagle3_pipeline.errors import DataError, StaleInputError
from eagle3_pipeline.planning import Status, plan
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import CONVERSATIONS, REJECTED, materialise_dataset
from eagle3_pipeline.store.fingerprint import table_content_id
from eagle3_pipeline_tests.planning.conftest import model  # noqa: F401  # a fixture

FIRST = "000000"


class Source:
    """A JSONL file, evaluation prompts and a pipeline over them."""

    def __init__(self, folder: Path, verifier: Path) -> None:
        self.folder, self.verifier = folder, verifier

    def write(self, *rows: Any) -> None:
        (self.folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def ask(self, *prompts: str) -> None:
        lines = (json.dumps({"category": "c", "prompt": prompt}) + "\n" for prompt in prompts)
        (self.folder / "prompts").write_text("".join(lines))

    def context(self, **dataset: Any) -> StageContext:
        spec = PipelineSpec.model_validate(
            {
                "name": "p",
                "verifier": {"model": str(self.verifier)},
                "dataset": {"path": str(self.folder / "a.jsonl"), "min_yield": 0.0, **dataset},
                "evaluation": {"prompts": str(self.folder / "prompts")},
            }
        )
        return StageContext(spec, lambda _: None, self.folder / "home", num_gpus=0)

    def rejected(self, context: StageContext) -> dict[int, str]:
        """Reasons by row, of the first chunk."""
        artifact = materialise_dataset(context, FIRST).artifact
        return {row["row_number"]: row["reason"] for row in pq.read_table(artifact.path(REJECTED)).to_pylist()}


@pytest.fixture
def source(tmp_path: Path, model: Path) -> Source:  # noqa: F811
    made = Source(tmp_path, model)
    made.ask("what is a river?")
    return made


def test_conversations_that_hold_an_evaluation_prompt_are_rejected(source: Source) -> None:
    source.write({"prompt": "What is a RIVER"}, {"prompt": "what is a lake?"})
    context = source.context()
    context.registry.sync(context.spec)
    assert source.rejected(context) == {0: "overlaps_evaluation"}
    assert source.rejected(source.context(decontaminate=False)) == {}


def test_other_languages_are_rejected(source: Source) -> None:
    rows = ["How does a motor work, and who invented it?", "Wie funktioniert ein Motor, und wer hat ihn erfunden?"]
    source.write(*({"prompt": row} for row in rows))
    context = source.context(filters={"languages": ["en"]})
    context.registry.sync(context.spec)
    assert source.rejected(context) == {1: "filtered_language"}


def test_edited_evaluation_prompts_make_datasets_stale_and_are_other_work(source: Source) -> None:
    source.write({"prompt": "what is a river?"}, {"prompt": "what is a lake?"})
    context = source.context()
    context.registry.sync(context.spec)
    before = materialise_dataset(context, FIRST).manifest
    planned = plan(context)
    source.ask("what is a river?", "what is a mountain?")
    edited = plan(source.context())
    (row,) = [row for row in edited.rows if row.stage == "dataset"]
    assert row.status is Status.STALE and "decontamination" in row.reason
    # Work that failed twice is tried again: it is not the same work any more.
    assert edited.work_ids[FIRST] != planned.work_ids[FIRST] and edited.work_ids[""] != planned.work_ids[""]
    # The same rows come out, so what is below stays fresh.
    assert materialise_dataset(source.context(), FIRST).manifest.content_id == before.content_id


@pytest.mark.parametrize(
    "changed",
    [
        {"filters": {"exclude_sources": ["bad"]}},
        {"tool_turns": "text"},
        {"columns": {"source": "origin"}},
        {"format": "prompt"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_changed_settings_ask_for_a_sync_since_it_decides_which_rows_are_duplicates(
    source: Source, changed: dict[str, Any]
) -> None:
    source.write({"prompt": "x", "source": "bad"}, {"prompt": "x", "source": "good"})
    context = source.context()
    context.registry.sync(context.spec)
    context = source.context(**changed)
    with pytest.raises(StaleInputError, match=r"keys of `dataset` .* changed since .*; run eagle3 sync-chunks p"):
        materialise_dataset(context, FIRST)
    context.registry.sync(context.spec)
    materialise_dataset(context, FIRST)
    materialise_dataset(source.context(**changed, min_yield=0.1, decontaminate=False), FIRST)


def test_the_copy_that_is_not_filtered_out_is_used(source: Source) -> None:
    source.write({"prompt": "x", "source": "bad"}, {"prompt": "x", "source": "good"})
    context = source.context(filters={"exclude_sources": ["bad"]})
    context.registry.sync(context.spec)
    assert source.rejected(context) == {0: "filtered_source"}


# --- instructions that prompts share ----------------------------------------------------------------------------------

SHARED = "You get a message of a customer of our shop. Name its kind, complaint, question or praise, and say why: "


def test_words_that_two_evaluation_prompts_share_do_not_count(source: Source) -> None:
    source.ask(SHARED + "money back", SHARED + "great")
    source.write({"prompt": SHARED + "parcel nine is late"}, {"prompt": SHARED + "Money back!"})
    context = source.context()
    context.registry.sync(context.spec)
    assert source.rejected(context) == {1: "overlaps_evaluation"}, "the whole prompt is found all the same"


def test_one_prompt_in_two_categories_is_one() -> None:
    twice, once = Decontamination([SHARED, SHARED]), Decontamination([SHARED])
    assert twice.content_id == once.content_id
    assert twice.check([{"role": "user", "content": "I say: " + SHARED}]) is not None
    # A prompt's own words stay, also beside a shared instruction; turns of one chat share nothing with each other.
    own = " ".join(f"w{i}" for i in range(13))
    both = Decontamination([SHARED + own, SHARED])
    assert both.check([{"role": "user", "content": own}]) is not None
    assert Decontamination([[SHARED + "a", SHARED + "b"]]).check([{"role": "assistant", "content": SHARED}]) is not None


def test_the_id_of_prompts_that_share_nothing_is_that_of_earlier_releases() -> None:
    # By hand: sorted keys, words in lower case.
    text = b'{"ngram_words":13,"prompts":["a b","c"]}'
    assert Decontamination(["C!", "a B"]).content_id == hashlib.sha256(text).hexdigest()[:32]
    assert Decontamination([SHARED + "a", SHARED + "b"]).content_id != Decontamination([SHARED + "a"]).content_id


def test_words_at_the_same_place_of_most_rows_are_an_instruction(source: Source) -> None:
    source.ask(SHARED + "money back")
    rows = [{"prompt": f"{SHARED}case {i}"} for i in range(8)]
    # One has it elsewhere, and one is the prompt.
    source.write(*rows, {"prompt": "Hello. " + SHARED}, {"prompt": SHARED + "money back"})
    context = source.context()
    context.registry.sync(context.spec)
    assert source.rejected(context) == {8: "overlaps_evaluation", 9: "overlaps_evaluation"}


def test_few_usable_rows_name_the_setting_that_decides(source: Source) -> None:
    source.ask(SHARED + "money back")
    source.write({"prompt": SHARED + "one"}, {"prompt": SHARED + "two"}, {"prompt": "three"})
    context = source.context(min_yield=0.5)
    context.registry.sync(context.spec)
    with pytest.raises(DataError, match=r"overlaps_evaluation 2.*set dataset\.decontaminate: false"):
        materialise_dataset(context, FIRST)


# --- what turns say beside their content ------------------------------------------------------------------------------


def test_reasoning_is_kept_in_the_file_and_unread_keys_are_metrics(source: Source) -> None:
    answer = {"role": "assistant", "content": "12", "reasoning_content": "four each", "weight": 0}
    user = {"role": "user", "content": "legs?", "name": "Ann"}
    source.write({"messages": [user, answer]}, {"prompt": "plain", "response": "r"})
    context = source.context()
    context.registry.sync(context.spec)
    made = materialise_dataset(context, FIRST)
    rows = pq.read_table(made.artifact.path(CONVERSATIONS)).to_pylist()
    assert [[(m["content"], m["reasoning"]) for m in row["messages"]] for row in rows] == [
        [("legs?", None), ("12", "four each")],
        [("plain", None), ("r", None)],
    ]
    metrics = made.manifest.metrics
    assert (metrics["unread_key_weight"], metrics["unread_key_name"]) == (1, 1)
    # What a deep verification compares.
    table = pq.read_table(made.artifact.path(CONVERSATIONS))
    assert table_content_id(table, CONTENT_COLUMNS) == made.manifest.content_id
    source.write({"prompt": "plain", "response": "r"})
    context.registry.sync(context.spec)
    plain = materialise_dataset(source.context(), FIRST).artifact
    assert pq.read_table(plain.path(CONVERSATIONS)).schema.equals(CONVERSATION_SCHEMA)
