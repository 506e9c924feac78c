"""Messages name the error that began a chain, not the last one only."""

from pathlib import Path

import pytest

from eagle3_pipeline.data.sources import open_huggingface
from eagle3_pipeline.errors import DataError, with_causes
from eagle3_pipeline_tests.data.conftest import write_jsonl
from eagle3_pipeline_tests.test_config import make_spec


def _chain() -> Exception:
    try:
        try:
            try:
                raise KeyError("the column")
            except KeyError:
                raise ValueError("line one\nline two") from None
        except ValueError as error:
            raise RuntimeError("it failed") from error
    except RuntimeError as error:
        return error


def test_every_cause_is_told_and_none_that_was_suppressed() -> None:
    assert with_causes(_chain()) == "it failed; caused by ValueError: line one line two"


def test_a_cause_that_the_text_holds_is_not_told_twice() -> None:
    try:
        try:
            raise OSError("no such thing")
        except OSError as error:
            raise RuntimeError(f"cannot: {error}") from error
    except RuntimeError as error:
        assert with_causes(error) == "cannot: no such thing"


def test_an_error_without_text_is_named_and_implicit_context_counts() -> None:
    try:
        try:
            raise TimeoutError
        except TimeoutError:
            raise RuntimeError("late")  # noqa: B904  # what happens inside libraries
    except RuntimeError as error:
        assert with_causes(error) == "late; caused by TimeoutError"


def test_the_hugging_face_error_names_the_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    write_jsonl(tmp_path / "data" / "a.jsonl", [{"prompt": "p", "response": "r"}])
    write_jsonl(tmp_path / "data" / "b.jsonl", [{"messages": [{"role": "user", "content": "q"}]}])
    dataset = {"path": str(tmp_path / "data"), "source": "huggingface"}
    spec = make_spec({"verifier": {"model": "m"}, "dataset": dataset})
    with pytest.raises(DataError, match="caused by .*prompt: string.*because column names don't match"):
        open_huggingface(spec.dataset)
