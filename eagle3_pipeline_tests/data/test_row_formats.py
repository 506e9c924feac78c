"""Formats, column names, content parts and tool calls."""

from typing import Any

import pytest

from eagle3_pipeline.config import DatasetSpec
from eagle3_pipeline.data.conversations import normalise
from eagle3_pipeline.data.rejection import Rejection


def spec(**dataset: Any) -> DatasetSpec:
    return DatasetSpec.model_validate({"path": "none", **dataset})


def talk(*contents: str, system: str = "") -> list[dict[str, str]]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


@pytest.mark.parametrize("row_format", ["auto", "prompt_response"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "response": "r"}, talk("p", "r")),
        ({"prompt": "p", "response": "r", "system": "s"}, talk("p", "r", system="s")),
        ({"prompt": "p", "response": None}, talk("p")),
        ({"prompt": "p", "response": " \n"}, talk("p")),
    ],
)
def test_prompt_and_response(row: dict, row_format: str, expected: list) -> None:
    assert normalise(row, spec(format=row_format)) == expected


def test_the_prompt_format_takes_no_response() -> None:
    assert normalise({"prompt": "p", "response": "r"}, spec(format="prompt")) == talk("p")


def test_prompt_and_response_need_both_columns() -> None:
    assert normalise({"prompt": "p"}, spec(format="prompt_response")) == Rejection(
        "wrong_shape", "no prompt_response row; its columns: 'prompt'"
    )
    assert normalise({"prompt": "p", "response": 3}, spec()) == Rejection(
        "wrong_shape", "turn 1 has content of type int"
    )


@pytest.mark.parametrize("row_format", ["auto", "alpaca"])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "i", "input": "", "output": "o"}, talk("i", "o")),
        ({"instruction": "i", "input": "about", "output": "o"}, talk("i\n\nabout", "o")),
        ({"instruction": "i", "output": "o", "system": "s"}, talk("i", "o", system="s")),
        ({"instruction": "i", "input": None, "output": ""}, talk("i")),
        ({"instruction": "i"}, talk("i")),
        ({"instruction": "i", "input": 3}, Rejection("wrong_shape", "input is int, expected text")),
        ({"instruction": ["i"], "input": "x"}, Rejection("wrong_shape", "turn 0 has content of type list")),
        ({"instruction": "i", "output": {"a": 1}}, Rejection("wrong_shape", "turn 1 has content of type dict")),
        ({"instruction": " ", "output": "o"}, Rejection("empty", "turn 0 is empty")),
    ],
)
def test_alpaca(row: dict, row_format: str, expected: list | Rejection) -> None:
    assert normalise(row, spec(format=row_format)) == expected


def test_columns_may_have_other_names_and_lie_within_others() -> None:
    columns = {"prompt": "question", "response": "answers.best", "system": "meta.setup.system"}
    row = {"question": "q", "answers": {"best": "a", "worst": "b"}, "meta": {"setup": {"system": "s"}}, "prompt": "no"}
    assert normalise(row, spec(columns=columns)) == talk("q", "a", system="s")
    # A column whose own name has a dot comes first.
    assert normalise({"question": "q", "answers.best": "x", "answers": {"best": "a"}}, spec(columns=columns)) == talk(
        "q", "x"
    )
    assert normalise({"question": "q", "answers": "text"}, spec(columns=columns)) == talk("q")


def test_chats_may_lie_in_other_columns() -> None:
    row = {"chat": [{"role": "user", "content": "q"}]}
    assert normalise(row, spec(columns={"messages": "chat"})) == talk("q")
    row = {"chat": [{"from": "human", "value": "q"}]}
    assert normalise(row, spec(format="sharegpt", columns={"conversations": "chat"})) == talk("q")


def test_rows_of_several_shapes_in_one_source() -> None:
    rows: list[dict[str, Any]] = [
        {"conversations": [{"from": "human", "value": "q"}]},
        {"messages": [{"role": "user", "content": "q"}]},
        {"prompt": "q"},
        {"instruction": "q"},
    ]
    assert [normalise(row, spec()) for row in rows] == [talk("q")] * 4


def test_columns_without_a_value_belong_to_other_rows_of_the_table() -> None:
    assert normalise({"messages": None, "conversations": None, "prompt": "q", "response": None}, spec()) == talk("q")
    assert normalise({"messages": None, "prompt": None}, spec()) == Rejection(
        "wrong_shape", "messages is NoneType, expected a list of turns"
    )


def test_content_parts_of_text_are_joined_and_others_rejected() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert normalise({"messages": [{"role": "user", "content": parts}]}, spec()) == talk("a b")
    picture = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    assert normalise({"messages": [{"role": "user", "content": picture}]}, spec()) == Rejection(
        "not_text", "turn 0 has a part of type 'image_url'"
    )
    assert normalise({"messages": [{"role": "user", "content": []}]}, spec()) == Rejection(
        "wrong_shape", "turn 0 has content of type list"
    )


CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "12 degrees"},
    {"role": "tool", "tool_call_id": "2", "content": "windy"},
    {"role": "assistant", "content": "cold"},
]


def test_tool_turns_are_rejected_by_default() -> None:
    assert normalise({"messages": TOOLS}, spec()) == Rejection(
        "tool_turn", "turn 1 ('assistant') is a tool's call or result"
    )
    sharegpt = [{"from": "human", "value": "q"}, {"from": "observation", "value": "x"}]
    assert normalise({"conversations": sharegpt}, spec()) == Rejection(
        "tool_turn", "turn 1 ('observation') is a tool's call or result"
    )


def test_tool_turns_are_kept_as_text_by_setting() -> None:
    call = (
        '[{"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Zürich\\"}"}}]'
    )
    expected = talk("weather?", call, "12 degrees\nwindy", "cold")
    assert normalise({"messages": TOOLS}, spec(tool_turns="text")) == expected
    said = [TOOLS[0], {**TOOLS[1], "content": "let me see"}, *TOOLS[2:]]
    assert normalise({"messages": said}, spec(tool_turns="text")) == talk(
        "weather?", "let me see\n" + call, "12 degrees\nwindy", "cold"
    )
    sharegpt = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": "f(1)"},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    assert normalise({"conversations": sharegpt}, spec(tool_turns="text")) == talk("q", "f(1)", "2", "two")


def test_null_tool_calls_are_none() -> None:
    turns = [
        {"role": "user", "content": "q", "tool_calls": None},
        {"role": "assistant", "content": "a", "tool_calls": []},
    ]
    assert normalise({"messages": turns}, spec()) == talk("q", "a")


def test_a_turn_without_a_role_is_named() -> None:
    assert normalise({"messages": [{"role": "user", "content": "q"}, {"content": "a"}]}, spec()) == Rejection(
        "wrong_shape", "turn 1 has no role"
    )


@pytest.mark.parametrize("system", [None, "", " \n"])
def test_a_blank_system_prompt_is_none(system: str | None) -> None:
    assert normalise({"prompt": "q", "system": system}, spec()) == talk("q")


@pytest.mark.parametrize("system", [0, False, [], {"text": "s"}])
def test_a_system_prompt_of_another_type_is_rejected(system: Any) -> None:
    found = normalise({"prompt": "q", "system": system}, spec())
    assert isinstance(found, Rejection) and found.detail.startswith("turn 0 has content of type")


def test_calls_that_are_nested_too_deeply_are_rejected() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": deep}]
    assert normalise({"messages": turns}, spec(tool_turns="text")) == Rejection(
        "wrong_shape", "values are nested too deeply"
    )
