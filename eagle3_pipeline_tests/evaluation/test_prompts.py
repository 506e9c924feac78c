"""Files of evaluation prompts."""

from pathlib import Path

import pytest

from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.evaluation.prompts import EvaluationPrompt, load_prompts, read_prompt_bytes


def _write(folder: Path, text: str) -> str:
    path = folder / "prompts.jsonl"
    path.write_text(text)
    return str(path)


def test_prompts_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, '{"category": "b", "prompt": "one"}\n\n{"prompt": "two", "category": "a"}\n')
    monkeypatch.setenv("PROMPTS", str(tmp_path))
    found = load_prompts("${PROMPTS}/prompts.jsonl")
    assert found == [EvaluationPrompt("b", "one"), EvaluationPrompt("a", "two")]


def test_the_same_prompt_of_two_categories_is_two(tmp_path: Path) -> None:
    location = _write(tmp_path, '{"category": "a", "prompt": "x"}\n{"category": "b", "prompt": "x"}\n')
    one, two = load_prompts(location)
    assert one.identity != two.identity


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("not json", "line 2: expected"),
        ("[1]", "line 2: expected"),
        ('{"category": "a"}', "line 2: expected .*'prompt'"),
        ('{"category": "a", "prompt": "x"}', "line 2: this prompt occurs twice"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    location = _write(tmp_path, f'{{"category": "a", "prompt": "x"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"evaluation\.prompts: .*prompts\.jsonl {expected}"):
        load_prompts(location)


def test_a_file_without_prompts_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts\.jsonl holds no prompt"):
        load_prompts(_write(tmp_path, "\n"))
    with pytest.raises(ConfigError, match=r"evaluation\.prompts: .*none\.jsonl cannot be read"):
        read_prompt_bytes(str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="nope_prompts.jsonl cannot be read"):
        load_prompts("builtin:nope")


def test_the_demos_prompts_have_several_categories() -> None:
    prompts = load_prompts("builtin:demo")
    assert len({prompt.identity for prompt in prompts}) == len(prompts)
    assert len({prompt.category for prompt in prompts}) >= 2
