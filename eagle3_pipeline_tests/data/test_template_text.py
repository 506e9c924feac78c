"""What a template reads: its clock is frozen, arguments without effect are refused, reasoning marks are found."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.config import GenerationSpec, PipelineSpec
from eagle3_pipeline.data.chat_template import ChatTemplate
from eagle3_pipeline.data.reasoning import HARMONY, THINK, Marks, split_reasoning, without_reasoning
from eagle3_pipeline.data.sequences import Prompt, RejectedTurn, Sequence, make_prompts, passthrough_sequences
from eagle3_pipeline.data.template_text import asks_for_clock, read_variables, settable_variables
from eagle3_pipeline.data.verifier import resolve_verifier
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline_tests.data.templates import CHATML, KIMI, byte_tokenizer, chat_template, turns, word_tokenizer
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

SPEC = GenerationSpec(max_new_tokens=8, max_sequence_tokens=512)
DATED = "{% if strftime_now is defined %}[{{ strftime_now('%d %b %Y %H:%M:%S') }}]{% endif %}" + CHATML
# As Llama 3.2: the clock is asked only where no date is given.
LLAMA32 = (
    "{% if date_string is not defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}{{ date_string }}" + CHATML
)
SWITCH = CHATML.replace(
    "assistant\n{% endif %}",
    "assistant\n{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}",
)


def made(template: str, tokenizer: Any = None, **more: Any) -> ChatTemplate:
    tokenizer = tokenizer or byte_tokenizer()
    tokenizer.eos_token = "<|im_end|>"
    kwargs = more.pop("kwargs", {})
    return ChatTemplate(tokenizer, template, kwargs, [], **more)


# --- the clock --------------------------------------------------------------------------------------------------------


def test_a_template_that_asks_for_the_clock_is_told_the_same_date_always() -> None:
    text = made(DATED).render(turns("hi"), generation_prompt=True)
    assert text.startswith("[01 Jan 2026 00:00:00]<|im_start|>user\nhi<|im_end|>")
    later = made(DATED, date=datetime.date(2025, 12, 31)).render(turns("hi"), generation_prompt=True)
    assert later.startswith("[31 Dec 2025 00:00:00]")
    given = made(LLAMA32, kwargs={"date_string": "today"}).render(turns("hi"), generation_prompt=True)
    assert given.startswith("today<|im_start|>")


@pytest.mark.parametrize(
    ("template", "kwargs", "expected"),
    [
        (DATED, {}, True),
        (CHATML, {}, False),
        (LLAMA32, {}, True),
        (LLAMA32, {"date_string": "26 Jul 2024"}, False),
        # Only with a system prompt.
        ("{% if messages[0].role == 'system' %}{{ strftime_now('%Y') }}{% endif %}" + CHATML, {}, True),
        ("{# strftime_now is not used #}" + CHATML, {}, False),
        ("{% macro today() %}{{ strftime_now('%d') }}{% endmacro %}{{ today() }}" + CHATML, {}, True),
    ],
)
def test_whether_the_clock_is_asked(template: str, kwargs: dict, expected: bool) -> None:
    assert asks_for_clock(template, kwargs) is expected


def test_a_template_that_is_another_each_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="uses random"):
        read_variables("{{ ['a', 'b'] | random }}")


def test_the_date_is_an_input_only_where_it_is_read(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "tiny")

    def inputs(**verifier: Any) -> list[dict[str, Any]]:
        spec = PipelineSpec.model_validate(
            {"name": "p", "verifier": {"model": str(tmp_path / "tiny"), **verifier}, "dataset": {"path": "x"}}
        )
        found = resolve_verifier(spec.verifier)
        return [ids.generations_identity(spec, found, "d").inputs, ids.baseline_identity(spec, found, b"p").inputs]

    assert all("template_date" not in one for one in inputs())
    assert [one["template_date"] for one in inputs(chat_template=DATED)] == ["2026-01-01"] * 2
    (tmp_path / "tiny" / "chat_template.jinja").write_text(DATED)
    assert [one["template_date"] for one in inputs()] == ["2026-01-01"] * 2


# --- arguments --------------------------------------------------------------------------------------------------------


def test_an_argument_without_effect_is_refused_with_those_that_have_one() -> None:
    assert settable_variables(SWITCH) == ["enable_thinking"]
    made(SWITCH, kwargs={"enable_thinking": False}).check_arguments()
    with pytest.raises(ConfigError, match=r"kwargs: thinking: .* does not use it; it uses enable_thinking"):
        made(SWITCH, kwargs={"thinking": False}).check_arguments()
    with pytest.raises(ConfigError, match="it uses no variable of its own"):
        made(CHATML, kwargs={"thinking": False}).check_arguments()
    # Set before it is read for others, and names of loops, are no variables of the caller.
    assert settable_variables("{% set x = 1 %}{{ x }}{% for m in messages %}{{ m }}{{ bos_token }}{% endfor %}") == []


@pytest.mark.parametrize("text", ["false", "True", " FALSE "])
def test_a_boolean_as_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"enable_thinking is the text .* without quotes"):
        made(SWITCH, kwargs={"enable_thinking": text}).check_arguments()


def test_a_tokenizer_of_its_own_code_may_read_more_than_its_template() -> None:
    tokenizer = byte_tokenizer()

    class Own(type(tokenizer)):  # type: ignore[misc]
        def apply_chat_template(self, messages: Any, **kwargs: Any) -> str:
            return f"{kwargs['tools_style']}: {messages[0]['content']}"

    tokenizer.__class__ = Own
    template = made(CHATML, tokenizer, kwargs={"tools_style": "ts"})
    template.check_arguments()
    assert template.render(turns("hi"), generation_prompt=True) == "ts: hi"


# --- ids outside the vocabulary ---------------------------------------------------------------------------------------


def test_a_turn_with_an_id_that_the_verifier_has_no_row_for_is_rejected_alone() -> None:
    tokenizer = word_tokenizer()
    size = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|beyond|>"]})
    template = made(CHATML, tokenizer, vocab_size=size)
    fine, bad = make_prompts("c", turns("hi", "fine", "<|beyond|>"), template, SPEC)
    assert isinstance(fine, Prompt) and isinstance(bad, RejectedTurn)
    assert (bad.turn, bad.rejection.reason) == (2, "outside_vocabulary")
    assert bad.rejection.detail == f"token id {size} ('<|beyond|>'), the verifier's vocabulary has ids 0 to {size - 1}"
    (other,) = passthrough_sequences("c", turns("hi", "<|beyond|>"), template, SPEC)
    assert isinstance(other, RejectedTurn) and other.rejection.reason == "outside_vocabulary"
    assert f"'<|beyond|>' ({size}) are rejected" in template.describe_vocabulary()
    assert "rejected" not in made(CHATML, tokenizer, vocab_size=size + 1).describe_vocabulary()


# --- reasoning --------------------------------------------------------------------------------------------------------

# Excerpts of what families write, in their own spelling.
MISTRAL = CHATML.replace("<|im_end|>\n{% endfor %}", "<|im_end|>\n{% endfor %}{# [THINK] [/THINK] #}")
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content is string and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if 'thinking' in m and loop.last %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% else %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NOVEL = QWEN.replace("<think>", "<<ponder>>").replace("</think>", "<</ponder>>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (KIMI, THINK),
        (MISTRAL, Marks("[THINK]", "[/THINK]")),
        (QWEN, THINK),
        (GPT_OSS, HARMONY),
        (NOVEL, Marks("<<ponder>>", "<</ponder>>")),
        (CHATML, THINK),
    ],
)
def test_marks_are_found_from_the_template(template: str, expected: Marks) -> None:
    assert made(template).marks == expected


def test_marks_are_a_setting() -> None:
    template = made(CHATML, marks=["<r>", "</r>"])
    history = turns("q", "one</r>a", "q")
    _, second = make_prompts("c", history, template, SPEC)
    assert isinstance(second, Prompt)
    assert "assistant\na<|im_end|>" in template.decode(second.input_ids)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("[THINK]let me see[/THINK]a1", "a1"),
        ("<think>let me see</think>\n\na1", "a1"),
        ("let me see</think>a1", "a1"),
        ("<seed:think>x</seed:think>a1", "a1"),
        ("<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>final<|message|>a1", "a1"),
        ("<|channel>thought\nx<channel|>a1", "a1"),
        # No reasoning: the marks are what the answer is about.
        ("write [/THINK] at its end", "write [/THINK] at its end"),
        ("use <thinking> and </thinking>", "use <thinking> and </thinking>"),
    ],
)
def test_history_is_free_of_reasoning_whatever_its_marks(answer: str, expected: str) -> None:
    assert without_reasoning(answer) == expected
    template = made(CHATML)
    _, second = make_prompts("c", turns("q", answer, "q2"), template, SPEC)
    assert isinstance(second, Prompt)
    assert f"assistant\n{expected}<|im_end|>" in template.decode(second.input_ids)


def test_a_sampled_answer_is_split_at_its_familys_marks() -> None:
    harmony = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"
    assert split_reasoning(harmony + "yes", [HARMONY]) == (harmony, "yes")
    assert split_reasoning("hm</think>yes") == ("hm</think>", "yes")
    assert split_reasoning("[THINK]hm[/THINK]yes") == ("[THINK]hm[/THINK]", "yes")
    assert split_reasoning("[THINK]hm", [Marks("[THINK]", "[/THINK]")]) == ("[THINK]hm", "")
    assert split_reasoning("hm", is_thinking=True) == ("hm", "")
    assert split_reasoning("plain") == ("", "plain")


def _supervised(template: ChatTemplate, messages: list[dict[str, str]]) -> list[str]:
    spec = GenerationSpec(mode="passthrough", max_new_tokens=8, max_sequence_tokens=512)
    found = passthrough_sequences("c", messages, template, spec)
    assert all(isinstance(one, Sequence) for one in found)
    return [
        template.decode([t for t, m in zip(one.input_ids, one.loss_mask, strict=True) if m])
        for one in found
        if isinstance(one, Sequence)
    ]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "<think>four each</think>12<|im_end|>"),
        (QWEN, "<think>\nfour each\n</think>\n\n12<|im_end|>"),
        (MISTRAL, "[THINK]four each[/THINK]12<|im_end|>"),
        # The prompt of a thinking verifier has begun it.
        (KIMI, "four each</think>12<|im_end|>"),
    ],
)
def test_reasoning_beside_the_content_is_trained_on(template: str, expected: str) -> None:
    messages = [{"role": "user", "content": "legs?"}, {"role": "assistant", "content": "12", "reasoning": "four each"}]
    assert _supervised(made(template), messages) == [expected]


def test_a_stop_token_behind_an_answer_is_trained_on() -> None:
    """GLM: the mark of the next turn stops the verifier; behind the last answer stands nothing."""
    glm = CHATML.replace("<|im_end|>\n", "")
    template = made(glm, stop_ids=[byte_tokenizer().convert_tokens_to_ids("<|im_start|>")])
    assert _supervised(template, turns("q1", "a1", "q2", "a2")) == ["a1<|im_start|>a2"]
    # A mark that stops nothing is not.
    assert _supervised(made(glm), turns("q1", "a1", "q2", "a2")) == ["a1a2"]
    assert chat_template(CHATML).answer_end() == "<|im_end|>\n" and template.answer_end() == ""
