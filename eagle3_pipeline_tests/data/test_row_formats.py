"""Formats, column names, content parts and tool calls."""

import datetime
import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_pipeline.config import DatasetSpec
from eagle3_pipeline.data.conversations import conversation_id, normalise
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.data.row_formats import unread_keys
from eagle3_pipeline.data.sources import read_rows


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


# --- one meaning, several spellings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, [], {}, "", " ", "[]", "{}", "null", "None"])
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_no_call_is_no_call_however_it_is_spelled(nothing: Any, key: str) -> None:
    turns = [{"role": "user", "content": "q", key: nothing}, {"role": "assistant", "content": "a", key: nothing}]
    assert normalise({"messages": turns}, spec()) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]


def test_calls_and_turns_may_be_json_texts() -> None:
    call = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    answer = {"role": "assistant", "content": "", "tool_calls": call}
    turns = [{"role": "user", "content": "q"}, answer]
    given = spec(tool_turns="text")
    expected = normalise({"messages": turns}, given)
    assert expected == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": '[{"function": {"name": "f", "arguments": {"x": 1}}}]'},
    ]
    as_text = [turns[0], answer | {"tool_calls": json.dumps(call)}]
    for spelled in (as_text, json.dumps(turns), json.dumps(as_text), [json.dumps(turn) for turn in turns]):
        assert normalise({"messages": spelled}, given) == expected
    assert normalise({"messages": as_text}, spec()).reason == "tool_turn"  # type: ignore[union-attr]
    assert normalise({"messages": "[not json"}, given).detail == "messages is str, expected a list of turns"  # type: ignore[union-attr]


def test_a_call_that_json_cannot_spell_is_rejected_and_a_date_is_its_text() -> None:
    def row(value: Any) -> dict[str, Any]:
        call = {"name": "f", "arguments": {"x": value}}
        return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "function_call": call}]}

    given = spec(tool_turns="text")
    kept = normalise(row(datetime.date(2025, 1, 2)), given)
    assert isinstance(kept, list) and kept[1]["content"] == '{"name": "f", "arguments": {"x": "2025-01-02"}}'
    rejected = normalise(row({1, 2}), given)
    assert rejected == Rejection("wrong_shape", "turn 1 has a call that JSON cannot spell: set")


def test_keys_that_a_table_fills_with_nulls_are_no_part_of_a_call(tmp_path: Path) -> None:
    def turns(name: str, **arguments: Any) -> list[dict[str, Any]]:
        call = [{"function": {"name": name, "arguments": arguments}}]
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": call}]

    rows = [{"messages": turns("weather", city="Oslo")}, {"messages": turns("stocks", ticker="ACME", days=3)}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    given = spec(tool_turns="text")
    found = [normalise(row.value or {}, given) for row in read_rows(given, str(tmp_path / "a.parquet"))]
    assert [one[1]["content"] for one in found if isinstance(one, list)] == [
        '[{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]',
        '[{"function": {"name": "stocks", "arguments": {"ticker": "ACME", "days": 3}}}]',
    ]
    # Written out in JSON a null is an argument.
    kept = normalise({"messages": turns("weather", city=None)}, given)
    assert '{"city": null}' in kept[1]["content"]  # type: ignore[index]


def test_maps_are_objects(tmp_path: Path) -> None:
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    turns = [[("role", "user"), ("content", "from Spark")], [("role", "assistant"), ("content", "a")]]
    twice = [[("role", "user"), ("role", "system"), ("content", "x")]]
    pq.write_table(pa.table({"messages": pa.array([turns, twice], kind)}), tmp_path / "a.parquet")
    first, second = read_rows(spec(), str(tmp_path / "a.parquet"))
    assert normalise(first.value or {}, spec()) == [
        {"role": "user", "content": "from Spark"},
        {"role": "assistant", "content": "a"},
    ]
    assert (second.value, second.reason) == (None, "unreadable_row")


# --- what a turn says beside its content ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_beside_the_content_is_kept_or_dropped_by_a_setting(key: str) -> None:
    turns = [{"role": "user", "content": "q", key: "no answer"}, {"role": "assistant", "content": "a", key: "why"}]
    assert normalise({"messages": turns}, spec()) == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning": "why"},
    ]
    plain = normalise({"messages": turns}, spec(reasoning="drop"))
    assert plain == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert unread_keys({"messages": turns}, spec(reasoning="drop")) == {key: 2}
    turns[1][key] = 7  # type: ignore[assignment]
    assert normalise({"messages": turns}, spec()) == Rejection("wrong_shape", "turn 1 has reasoning of type int")


def test_the_identity_of_a_conversation_without_reasoning_is_that_of_earlier_releases() -> None:
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    expected = hashlib.sha256(b'[["user","q"],["assistant","a"]]').hexdigest()[:32]
    assert conversation_id(plain) == conversation_id([plain[0], plain[1] | {"reasoning": None}]) == expected  # type: ignore[dict-item,list-item]
    assert conversation_id([plain[0], plain[1] | {"reasoning": "r"}]) != expected


def test_keys_that_nothing_reads_are_counted_where_they_say_something() -> None:
    turns = [
        {"role": "user", "content": "q", "name": "Ann", "weight": None, "refusal": ""},
        {"role": "assistant", "content": "a", "name": "Bot", "weight": 0, "tool_calls": []},
    ]
    assert unread_keys({"messages": turns}, spec()) == {"name": 2, "weight": 1}
    assert unread_keys({"prompt": "q", "id": 3}, spec()) == {}
