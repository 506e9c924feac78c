"""Rows of all shapes become conversations, or say why not."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3_pipeline.config import DatasetSpec
from eagle3_pipeline.data.conversations import (
    CONVERSATION_SCHEMA,
    REJECTED_SCHEMA,
    conversation_id,
    normalise,
)
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.data.sources import read_rows


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _spec(**dataset: Any) -> DatasetSpec:
    return DatasetSpec.model_validate({"path": "none", **dataset})


HELLO = [_turn("user", "hello"), _turn("assistant", "hi")]


@pytest.mark.parametrize(
    ("row", "row_format", "expected"),
    [
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}, "sharegpt", HELLO),
        ({"conversations": [{"from": "user", "value": "hello"}, {"from": "chatgpt", "value": "hi"}]}, "auto", HELLO),
        ({"messages": [{"role": "User ", "content": "hello"}, {"role": "MODEL", "content": "hi"}]}, "messages", HELLO),
        ({"conversations": HELLO}, "auto", HELLO),
        ({"messages": HELLO, "prompt": "other"}, "auto", HELLO),
        ({"prompt": "hello"}, "prompt", HELLO[:1]),
        ({"prompt": "hello", "system": "be nice"}, "auto", [_turn("system", "be nice"), *HELLO[:1]]),
        ({"prompt": "hello", "system": ""}, "prompt", HELLO[:1]),
        ({"messages": HELLO, "prompt": "hello"}, "prompt", HELLO[:1]),
        ({"messages": [_turn("system", "s"), *HELLO, _turn("user", "bye")]}, "auto", None),
        ({"messages": [_turn("user", "  hello\n")]}, "auto", [_turn("user", "  hello\n")]),
    ],
)
def test_accepted_shapes(row: dict, row_format: str, expected: list | None) -> None:
    assert normalise(row, _spec(format=row_format)) == (row["messages"] if expected is None else expected)


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({}, "wrong_shape", "no auto row; its columns: "),
        ({"text": "x", "id": 3}, "wrong_shape", "no auto row; its columns: 'text', 'id'"),
        ({"messages": "hello"}, "wrong_shape", "messages is str, expected a list of turns"),
        ({"messages": None}, "wrong_shape", "messages is NoneType, expected a list of turns"),
        (
            {"messages": ["hello"]},
            "wrong_shape",
            "no auto row; its columns: 'messages'; messages is a list of text",
        ),
        (
            {"messages": [["role", "user"]]},
            "wrong_shape",
            "no auto row; its columns: 'messages'; messages is a list of list",
        ),
        ({"messages": [{"role": "user"}]}, "wrong_shape", "turn 0 has content of type NoneType"),
        ({"messages": [_turn("user", 3)]}, "wrong_shape", "turn 0 has content of type int"),
        ({"prompt": None}, "wrong_shape", "turn 0 has content of type NoneType"),
        ({"messages": []}, "empty", "messages has no turns"),
        ({"prompt": " \n"}, "empty", "turn 0 is empty"),
        ({"messages": [*HELLO, _turn("user", "")]}, "empty", "turn 2 is empty"),
        ({"messages": [_turn("robot", "x")]}, "bad_role", "turn 0 has role 'robot'"),
        ({"messages": [{"role": None, "content": "x"}]}, "bad_role", "turn 0 has role 'None'"),
        ({"prompt": "\ud800"}, "invalid_text", "turn 0 is not valid Unicode: surrogates not allowed"),
        ({"messages": [_turn("system", "s")]}, "no_user_turn", "only a system message"),
        ({"messages": [HELLO[1]]}, "not_alternating", "turn 0 is assistant, expected user"),
        ({"messages": [HELLO[0], HELLO[0]]}, "not_alternating", "turn 1 is user, expected assistant"),
        ({"messages": [*HELLO, _turn("system", "s")]}, "not_alternating", "turn 2 is system, expected user"),
    ],
)
def test_rejections_say_why_and_where(row: dict, reason: str, detail: str) -> None:
    assert normalise(row, _spec()) == Rejection(reason, detail)


@pytest.mark.parametrize(("row_format", "row"), [("messages", {"prompt": "x"}), ("sharegpt", {"messages": HELLO})])
def test_a_format_that_is_named_excludes_the_others(row_format: str, row: dict) -> None:
    found = normalise(row, _spec(format=row_format))
    assert isinstance(found, Rejection) and found.detail.startswith(f"no {row_format} row")


def test_the_identity_of_a_conversation_is_its_turns() -> None:
    assert conversation_id(HELLO) == conversation_id([dict(reversed(list(turn.items()))) for turn in HELLO])
    others = [HELLO[:1], HELLO[::-1], [_turn("user", "hello "), HELLO[1]], [_turn("system", "hello"), HELLO[1]]]
    assert len({conversation_id(HELLO), *map(conversation_id, others)}) == 5


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "messages", "conversations", "prompt", "system"])
            | st.text(st.characters(), max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)
ROLES = st.sampled_from(["user", "assistant", "system", "human", "gpt", "tool", ""])
TURNS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.text(st.characters(), max_size=5)}), max_size=4)
LINES = st.lists(
    JUNK.map(lambda value: json.dumps(value).encode())
    | TURNS.map(lambda value: json.dumps({"messages": value}).encode())
    | st.binary(max_size=20).filter(lambda line: b"\n" not in line),
    max_size=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES)
def test_every_line_of_a_mess_is_accepted_or_rejected_and_both_can_be_stored(
    tmp_path: Path, lines: list[bytes]
) -> None:
    path = tmp_path / "mess.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    spec = _spec(path=str(path))
    accepted, rejected = [], []
    for row in read_rows(spec, str(path)):
        outcome = Rejection(row.reason, "") if row.value is None else normalise(row.value, spec)
        place = {"row_number": row.number, "raw": row.raw}
        if isinstance(outcome, Rejection):
            assert outcome.reason
            rejected.append({**place, "reason": outcome.reason, "detail": outcome.detail})
        else:
            assert all(set(turn) == {"role", "content"} and turn["content"].strip() for turn in outcome)
            accepted.append({**place, "conversation_id": conversation_id(outcome), "messages": outcome})
    assert len(accepted) + len(rejected) == len(lines)
    pa.Table.from_pylist(accepted, CONVERSATION_SCHEMA)
    pa.Table.from_pylist(rejected, REJECTED_SCHEMA)
