"""Chunks whose captures are wrong are not published, and say which check found it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3_pipeline.stages import capture
from eagle3_pipeline.store.shards import HEADER_BYTES, shard_name
from eagle3_pipeline_tests.assets.conftest import Pipeline
from eagle3_pipeline_tests.assets.test_graph import FIRST, failure, metadata, published


def damage(folder: Path, num_rows: int) -> None:
    """Doubles every value of the first `num_rows` rows: finite, not zero, not theirs."""
    row = 4 * 128
    values = np.memmap(folder / shard_name(0), dtype="<u2", mode="r+", offset=HEADER_BYTES, shape=(num_rows, row))
    # bf16 doubles when its exponent, from bit 7 on, grows by one.
    values[:] = values + np.uint16(1 << 7)
    values.flush()


def test_a_sequence_captured_alone_equals_its_batched_capture(pipeline: Pipeline) -> None:
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert metadata(result, "hidden_states")["recapture_difference"] == 0


def test_states_that_depend_on_the_batch_are_refused(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = capture.seal_capture

    def seal_wrong_states(
        context: Any, where: str, folder: Path, tokens: capture.Tokens, *rest: Any
    ) -> dict[str, float]:
        statistics = sealed(context, where, folder, tokens, *rest)
        damage(folder, sum(map(len, tokens.values())))
        return statistics

    monkeypatch.setattr("eagle3_pipeline.stages.verifier_outputs.seal_capture", seal_wrong_states)
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert "differ by 100.0% from those of the same sequence captured alone" in failure(result)
    assert published(pipeline.home, "hidden_states") == []


def test_states_that_do_not_predict_the_answers_are_refused(pipeline: Pipeline) -> None:
    """The fake's states are those of no model; with the check on, they are found out."""
    pipeline.configure(capture={"min_next_token_agreement": 0.99})
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert "the captured states name the next token in" in failure(result)
    assert published(pipeline.home, "hidden_states") == []


def test_an_engine_that_decodes_wrongly_while_it_captures_does_both_apart(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "wrong_decoding:smoke")
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert result.success, failure(result)
    assert metadata(result, "hidden_states")["one_pass"] == 0


def test_answers_of_an_engine_that_decoded_wrongly_are_taken_back(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes its smoke test; the next attempt generates and captures apart."""
    # Names of sequences are hexadecimal numbers, most of which hold an `a`.
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "wrong_decoding:a")
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert "the states of answers" in failure(result)
    assert published(pipeline.home, "synthetic_generations") == published(pipeline.home, "hidden_states") == []
    quarantined = list((pipeline.home / "store" / "quarantine").glob("synthetic_generations*"))
    assert len(quarantined) == 1
    assert not list((pipeline.home / "scratch" / "synthetic_generations").glob("*/journal.jsonl"))
    result = pipeline.run("generate_and_capture", FIRST)
    assert result.success, failure(result)
    assert metadata(result, "hidden_states")["one_pass"] == 0


def test_an_engine_that_samples_garbage_while_it_captures_does_both_apart(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLE3_FAKE_FAIL", "garbage")
    pipeline.configure(generation={"temperature": 0.7}, capture={"min_next_token_agreement": 0.0})
    assert pipeline.run("prepare_data", FIRST).success
    result = pipeline.run("generate_and_capture", FIRST)
    assert result.success, failure(result)
    assert metadata(result, "hidden_states")["one_pass"] == 0
