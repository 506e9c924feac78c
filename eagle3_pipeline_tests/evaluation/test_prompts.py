"""Files of evaluation prompts."""

import hashlib
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


# --- chats ------------------------------------------------------------------------------------------------------------


def test_texts_and_messages_are_chats_and_one_text_is_a_prompt(tmp_path: Path) -> None:
    lines = [
        '{"category": "w", "prompt": ["Write.", "Shorter."]}',
        '{"category": "w", "turns": ["Write.", "Longer."], "prompt": null}',
        '{"category": "c", "messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "q"},'
        ' {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]}',
        '{"category": "c", "prompt": [{"role": "user", "content": "hello"}]}',
        '{"category": "c", "prompt": ["one"]}',
    ]
    writing, longer, chat, hello, one = load_prompts(_write(tmp_path, "\n".join(lines)))
    assert writing == EvaluationPrompt("w", "Shorter.", (("user", "Write."), ("user", "Shorter.")))
    assert longer.user_texts == ["Write.", "Longer."] and longer.identity != writing.identity
    assert chat.messages == (("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "r"))
    assert hello == EvaluationPrompt("c", "hello") and one == EvaluationPrompt("c", "one")


def test_the_identity_of_a_plain_prompt_is_that_of_earlier_releases() -> None:
    # sha256 of ["a","x"], the first 32 digits.
    assert EvaluationPrompt("a", "x").identity == hashlib.sha256(b'["a","x"]').hexdigest()[:32]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"category": "a", "prompt": null}', "'prompt' is null"),
        ('{"category": "a", "prompt": 7}', "'prompt' is int"),
        ('{"category": "a", "prompt": {"text": "x"}}', "'prompt' is dict"),
        ('{"category": "a", "prompt": []}', "an empty list"),
        ('{"category": "a", "prompt": [["x"]]}', "turn 0 is list"),
        ('{"category": "a", "prompt": ["x", 3]}', "turn 1 is int"),
        ('{"category": "a", "prompt": ["x", " "]}', "turn 1 is empty"),
        ('{"category": 3, "prompt": "x"}', "'category' is int"),
        ('{"category": null, "prompt": "x"}', "'category' is null"),
        ('{"prompt": "x"}', "'category' is missing"),
        ('{"category": "a", "prompt": "x", "turns": ["y"]}', "'prompt' and 'turns' are given"),
        ('{"category": "a", "messages": "x"}', "'messages' is str"),
        ('{"category": "a", "messages": [{"role": "tool", "content": "x"}]}', "turn 0 has role 'tool'"),
        ('{"category": "a", "messages": [{"content": "x"}]}', "turn 0 has role None"),
        ('{"category": "a", "messages": [{"role": "user", "content": null}]}', "turn 0 is NoneType"),
        ('{"category": "a", "messages": [{"role": "assistant", "content": "x"}]}', "ends with a turn of the assistant"),
        (
            '{"category": "a", "messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}',
            "turn 0 is the assistant's and follows no turn of the user",
        ),
        (
            '{"category": "a", "messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]}',
            "a system turn that is not the first",
        ),
    ],
)
def test_anything_else_is_refused_with_its_line(tmp_path: Path, line: str, expected: str) -> None:
    location = _write(tmp_path, f'{{"category": "a", "prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl line 2: expected .*{expected}"):
        load_prompts(location)
