"""The undrafted verifier: answers and states from the capturing engine, speed from one that does nothing else."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.chat_template import ChatTemplate, load_tokenizer
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import ConfigError, EngineError
from eagle3_pipeline.stages import baseline, speeds
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.engines import timed_engine
from eagle3_pipeline.stages.templates import chat_template, prompt_rows
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

NUM_PROMPTS, NEW_TOKENS = 3, 6


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StageContext]:
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
    # Who waited for an engine of the chunks as for any other would wait longer than a test may take.
    monkeypatch.setattr("eagle3_pipeline.engine.manager._PATIENCE_S", (600.0, 600.0))
    monkeypatch.setattr("eagle3_pipeline.engine.manager._SAME_MODEL_PATIENCE_S", 0.2)
    make_tiny_llama(tmp_path / "tiny")
    prompts = [json.dumps({"category": f"c{i % 2}", "prompt": f"tell {i}"}) + "\n" for i in range(NUM_PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    spec = PipelineSpec.model_validate(
        {
            "name": "timed",
            "verifier": {"model": str(tmp_path / "tiny")},
            "dataset": {"path": "none"},
            "generation": {"max_new_tokens": 6, "max_sequence_tokens": 96},
            "vocab": {"draft_vocab_size": 64},
            "training": {"batch_tokens": 96},
            "evaluation": {
                "prompts": str(tmp_path / "prompts.jsonl"),
                "max_new_tokens": NEW_TOKENS,
                "other_batch_sizes": [2],
            },
            "resources": {"num_gpus": 0, "max_engines": 4},
        }
    )
    made = StageContext(spec, lambda _line: None, tmp_path / "home", num_gpus=0)
    yield made
    made.engines.stop_all(lambda _line: None)


def engines(context: StageContext) -> list[EngineSpec]:
    """Specs in the order of their starts."""
    folder = context.engines.folder
    return [EngineSpec.from_json((folder / s["engine_id"] / "spec.json").read_text()) for s in context.engines.starts()]


def test_speed_is_that_of_an_engine_that_neither_captures_nor_stays(context: StageContext) -> None:
    made = baseline.materialise_baseline(context)
    captures, timed = engines(context)
    assert captures.layer_ids and not timed.layer_ids and timed.timed
    assert captures.max_engines == 4 and timed.max_engines == 1, "who is asked for counters is who does the work"
    assert made.manifest.metrics["num_engine_starts"] == 2
    assert not context.engines.is_running(timed), "nobody waits until it has been idle for long"
    rows = {row["category"]: row for row in pq.read_table(made.artifact.path(baseline.SPEEDS)).to_pylist()}
    # Two prompts of c0 and one of c1, all of the length that the fake engine gives; the warm-up is not among them.
    assert {name: row["num_prompts"] for name, row in rows.items()} == {"c0": 2, "c1": 1}
    sequences = pq.read_table(made.artifact.path(baseline.SEQUENCES)).to_pylist()
    new = {row["sequence_id"]: len(row["input_ids"]) - row["num_prompt_tokens"] for row in sequences}
    assert sum(row["num_new_tokens"] for row in rows.values()) == sum(new.values())
    (batch,) = pq.read_table(made.artifact.path(speeds.BATCH_SPEEDS)).to_pylist()
    assert (batch["batch_size"], batch["num_new_tokens"]) == (2, sum(new.values()))


def test_answers_of_a_life_that_ended_before_the_timing_are_kept(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise EngineError("the second load failed")

    with monkeypatch.context() as patch:
        patch.setattr(baseline, "_measure_speeds", fail)
        with pytest.raises(EngineError, match="the second load failed"):
            baseline.materialise_baseline(context)
    context.engines.stop_all(lambda _line: None)
    made = baseline.materialise_baseline(context)
    assert [bool(engine.layer_ids) for engine in engines(context)] == [True, False], "the capturing engine once"
    assert len(pq.read_table(made.artifact.path(baseline.SEQUENCES))) == NUM_PROMPTS
    assert len(pq.read_table(made.artifact.path("index.parquet"))) == NUM_PROMPTS


def test_one_pipeline_is_timed_at_a_time(context: StageContext) -> None:
    """Two at once on one engine gave each a speed a quarter too low, and kept it."""
    engine, seen = context.timed_engine_spec(), list[str]()

    def time_it(name: str) -> None:
        with timed_engine(context, engine):
            seen.append(f"{name} begins")
            time.sleep(1.0)
            seen.append(f"{name} ends")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(time_it, "ab"))
    first, second = ("a", "b") if seen[0].startswith("a") else ("b", "a")
    assert seen == [f"{first} begins", f"{first} ends", f"{second} begins", f"{second} ends"]


def test_what_cannot_be_timed_is_not_answered_either(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(spec: EngineSpec) -> None:
        if spec.timed:
            raise EngineError("it failed before")

    monkeypatch.setattr(context.engines, "require_startable", refuse)
    with pytest.raises(EngineError, match="it failed before"):
        baseline.materialise_baseline(context)
    assert context.engines.starts() == []


def test_short_answers_warm_up_with_as_few_tokens(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight tokens more than a prompt that leaves room for two would be refused, after both loads."""
    asked: list[int] = []

    def time_answers(*args: Any, **changes: Any) -> speeds.Timed:
        asked.append(changes["max_tokens"])
        return speeds.Timed({}, 1.0)

    monkeypatch.setattr(speeds, "time_answers", time_answers)
    for most in (2, 100):
        evaluation = context.spec.evaluation.model_copy(update={"max_new_tokens": most})
        short = StageContext(context.spec.model_copy(update={"evaluation": evaluation}), home=context.home, num_gpus=0)
        speeds.warm_up(short, short.timed_engine_spec(), None, {"c": [{}] * 4})  # type: ignore[arg-type]
    assert asked == [2, 2, 8, 8]


def test_states_are_on_the_disk_before_the_file_that_says_so(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A life that ended by a loss of power would leave the file, and damaged states that nobody looks at again."""
    flushed: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split("-")[0])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    made = baseline.materialise_baseline(context)
    first = next(i for i, name in enumerate(flushed) if baseline.SEQUENCES in name)
    assert {"shard", "index.parquet"} <= set(flushed[:first])
    assert made.manifest.files["shard-00000.safetensors"].xxh3.startswith("rows:")


# --- what was asked ---------------------------------------------------------------------------------------------------


def _with_prompts(context: StageContext, folder: Path, *lines: dict[str, Any]) -> StageContext:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return StageContext(context.spec, lambda _line: None, context.home, num_gpus=0)


def test_turns_of_a_chat_are_asked_one_after_the_other_with_the_verifiers_own_answers(
    context: StageContext, tmp_path: Path
) -> None:
    chat = {"category": "w", "prompt": ["write", "shorter"]}
    given = {"category": "c", "messages": [{"role": r, "content": r[0]} for r in ("user", "assistant", "user")]}
    context = _with_prompts(context, tmp_path, chat, given)
    made = baseline.materialise_baseline(context)
    rows = pq.read_table(made.artifact.path(baseline.SEQUENCES)).to_pylist()
    assert [row["text"] for row in rows] == ["w", "c", "w"]
    template = chat_template(context)
    first, history, second = (template.decode(row["input_ids"][: row["num_prompt_tokens"]]) for row in rows)
    answer = [token for token in rows[0]["input_ids"][rows[0]["num_prompt_tokens"] :] if token not in (1, 2)]

    def turn(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    opening = "<|im_start|>assistant\n"
    assert first == turn("user", "write") + opening
    assert history == turn("user", "u") + turn("assistant", "a") + turn("user", "u") + opening
    said = template.decode(answer).strip()
    assert second == turn("user", "write") + turn("assistant", said) + turn("user", "shorter") + opening
    # All three have states, and a speed.
    assert len(pq.read_table(made.artifact.path("index.parquet"))) == 3
    speed = pq.read_table(made.artifact.path(baseline.SPEEDS)).to_pylist()
    assert {row["category"]: row["num_prompts"] for row in speed} == {"w": 2, "c": 1}


def test_a_chat_that_cannot_fit_is_told_before_any_engine_starts(context: StageContext, tmp_path: Path) -> None:
    context = _with_prompts(context, tmp_path, {"category": "w", "prompt": ["x" * 30, "y" * 30]})
    with pytest.raises(ConfigError, match=r"evaluation prompt 'yyy.*exceed generation\.max_sequence_tokens 96"):
        baseline.materialise_baseline(context)
    assert context.engines.starts() == []


def test_a_prompt_with_an_id_that_the_verifier_has_no_row_for_is_named(context: StageContext, tmp_path: Path) -> None:
    file = tmp_path / "tiny" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    added = {"id": 320, "content": "<|beyond|>", "special": True}
    tokenizer["added_tokens"].append(dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | added)
    tokenizer["model"]["vocab"].update({f"<|pad{i}|>": i for i in range(len(tokenizer["model"]["vocab"]), 320)})
    file.write_text(json.dumps(tokenizer))
    load_tokenizer.cache_clear()
    context = _with_prompts(context, tmp_path, {"category": "w", "prompt": "what is <|beyond|>"})
    with pytest.raises(ConfigError, match=r"'what is <|beyond|>' \(w\) holds token id 320 .*ids 0 to 319"):
        prompt_rows(context)
    load_tokenizer.cache_clear()


def test_answers_to_other_prompts_than_those_rendered_now_are_made_again(
    context: StageContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same name and fingerprint, another prompt: an update of a tokenizer's code between two attempts."""

    def fail(*_: Any) -> None:
        raise EngineError("the second load failed")

    with monkeypatch.context() as patch:
        patch.setattr(baseline, "_measure_speeds", fail)
        with pytest.raises(EngineError):
            baseline.materialise_baseline(context)
    context.engines.stop_all(lambda _line: None)
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda *args, **kwargs: "Now: " + render(*args, **kwargs))
    made = baseline.materialise_baseline(context)
    rows = pq.read_table(made.artifact.path(baseline.SEQUENCES)).to_pylist()
    template = chat_template(context)
    assert len(rows) == NUM_PROMPTS
    assert all(template.decode(row["input_ids"]).startswith("Now: <|im_start|>user") for row in rows)
    states = pq.read_table(made.artifact.path("index.parquet")).to_pylist()
    assert {row["sequence_id"]: row["num_tokens"] for row in states} == {
        row["sequence_id"]: len(row["input_ids"]) - 1 for row in rows
    }
