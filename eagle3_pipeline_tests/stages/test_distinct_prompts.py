"""Each different prompt is answered once, within a chunk and across chunks; equal beginnings lie on one side."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.templates import chat_template
from eagle3_pipeline.stages.verifier_outputs import REJECTED, SEQUENCES, materialise_outputs
from eagle3_pipeline.training.split import conversation_groups
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]}


class Logs:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, *rows: dict[str, Any]) -> None:
        (self.folder / "data").mkdir(exist_ok=True)
        (self.folder / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def context(self, mode: str = "regenerate") -> StageContext:
        spec = PipelineSpec.model_validate(
            {
                "name": "p",
                "verifier": {"model": str(self.folder / "tiny")},
                "dataset": {"path": str(self.folder / "data" / "*"), "samples_per_chunk": 20},
                "generation": {"max_new_tokens": 6, "max_sequence_tokens": 400, "mode": mode},
                "vocab": {"draft_vocab_size": 64},
                "resources": {"num_gpus": 0},
            }
        )
        return StageContext(spec, lambda _: None, self.folder / "home", num_gpus=0)

    def prompts(self, context: StageContext, chunk: str) -> list[str]:
        """The last user turns that are answered."""
        materialise_dataset(context, chunk)
        made = materialise_outputs(context, chunk, hidden_states=False).generations
        if made is None:
            return []
        template = chat_template(context)
        rows = pq.read_table(made.artifact.path(SEQUENCES)).to_pylist()
        texts = [template.decode(row["input_ids"][: row["num_prompt_tokens"]]) for row in rows]
        return [text.rpartition("user\n")[2].partition("<|im_end|>")[0] for text in texts]

    def rejected(self, context: StageContext, chunk: str) -> list[tuple[str, int]]:
        artifact = context.upstream(ids.SYNTHETIC_GENERATIONS, chunk)
        return [(row["reason"], row["turn"]) for row in pq.read_table(artifact.path(REJECTED)).to_pylist()]


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Logs]:
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
    make_tiny_llama(tmp_path / "tiny")
    made = Logs(tmp_path)
    yield made
    made.context().engines.stop_all(lambda _: None)


def test_a_history_in_every_request_is_asked_once(logs: Logs) -> None:
    logs.write(
        "a.jsonl",
        chat("one"),
        chat("one", "a", "two"),
        chat("one", "a", "two", "b", "three"),
        # Another answer's reasoning is no part of a prompt.
        chat("one", "<think>hm</think>a", "two"),
        {"prompt": "colour", "response": "red"},
        {"prompt": "colour", "response": "blue"},
    )
    context = logs.context()
    context.registry.sync(context.spec)
    assert logs.prompts(context, "000000") == ["one", "two", "three", "colour"]
    assert logs.rejected(context, "000000") == [("duplicate_prompt", t) for t in (0, 0, 2, 0, 2, 0)]


def test_a_prompt_of_an_earlier_chunk_is_asked_there(logs: Logs) -> None:
    logs.write("a.jsonl", chat("one"), {"prompt": "colour", "response": "red"})
    context = logs.context()
    context.registry.sync(context.spec)
    assert logs.prompts(context, "000000") == ["one", "colour"]
    before = context.registry.chunk("000000")
    logs.write("b.jsonl", chat("one", "a", "two"), {"prompt": "colour", "response": "blue"})
    logs.write("c.jsonl", {"prompt": "colour", "response": "green"}, {"prompt": "one", "response": "x"})
    context.registry.sync(context.spec)
    assert context.registry.chunk("000000") == before, "an old chunk loses nothing to a newer one"
    assert context.registry.chunk("000001").duplicate_turns == ((0, 0), (1, 0))
    assert logs.prompts(context, "000001") == ["two"]
    assert sorted(logs.rejected(context, "000001")) == [("duplicate_prompt", 0)] * 2
    # All of the third chunk is asked elsewhere: there is nothing to do for it, and nothing waits for it.
    assert logs.prompts(context, "000002") == []
    found = {(row.stage, row.chunk) for row in plan(context).rows}
    assert (ids.DATASET, "000002") in found and (ids.SYNTHETIC_GENERATIONS, "000002") not in found
    # Where answers are kept, they are others.
    kept = logs.context("passthrough")
    made = materialise_outputs(kept, "000002", hidden_states=False).generations
    assert made and made.manifest.metrics["num_sequences"] == 2
    assert "repeated_turns" not in made.manifest.inputs


def test_a_chunk_that_an_earlier_release_registered_keeps_its_prompts(logs: Logs) -> None:
    logs.write("a.jsonl", chat("one"))
    logs.write("b.jsonl", chat("one", "a", "two"))
    context = logs.context()
    context.registry.sync(context.spec)
    path = context.registry._path
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["duplicate_turns"], line["num_own_turns"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Another file lets the registry be made anew.
    logs.write("c.jsonl", chat("one", "a", "two", "b", "three"))
    context.registry.sync(context.spec)
    _, old, new = context.registry.chunks()
    assert (old.duplicate_turns, old.repeated_turns_id, new.duplicate_turns) == (None, "", ((0, 0), (0, 2)))
    assert [json.loads(line) for line in path.read_text().splitlines()][:2] == lines
    assert logs.prompts(context, "000001") == ["one", "two"] and logs.prompts(context, "000002") == ["three"]


def test_conversations_that_begin_alike_are_split_as_one() -> None:
    roots = {"a": "r", "b": "s", "c": "r", "d": None, "e": "r"}
    assert conversation_groups(roots) == {"a": "a", "b": "b", "c": "a", "d": "d", "e": "a"}


def test_the_file_says_what_conversations_begin_with(logs: Logs) -> None:
    logs.write("a.jsonl", chat("one"), chat("one", "a", "two"), chat("other"))
    context = logs.context()
    context.registry.sync(context.spec)
    logs.prompts(context, "000000")
    rows = pq.read_table(context.upstream(ids.SYNTHETIC_GENERATIONS, "000000").path(SEQUENCES)).to_pylist()
    first, second, third = (row["root"] for row in rows)
    assert first == second != third and rows[0]["conversation_id"] != rows[1]["conversation_id"]
