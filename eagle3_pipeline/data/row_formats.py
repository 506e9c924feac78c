"""Shapes of rows: chats, prompt and response, Alpaca's columns; tool calls and content parts as text."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3_pipeline.config import ColumnsSpec, DatasetSpec
from eagle3_pipeline.data.rejection import Rejection

_CALL_ROLES = ("function_call", "tool_call")
_RESULT_ROLES = ("tool", "function", "observation", "tool_response", "ipython")
_CALL_KEYS = ("tool_calls", "function_call")
_MISSING = object()


@dataclass(frozen=True)
class Turn:
    """A turn as the row has it; `content` is whatever was found where text should be."""

    role: Any
    content: Any
    is_tool_result: bool = False


def column(row: dict[str, Any], name: str) -> Any:
    """The value of a column, or of a key within it (`a.b`); `None` if there is none."""
    found = _find(row, name)
    return None if found is _MISSING else found


def _find(row: dict[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    outer, dot, inner = name.partition(".")
    nested = row.get(outer)
    return _find(nested, inner) if dot and isinstance(nested, dict) else _MISSING


def read_turns(row: dict[str, Any], spec: DatasetSpec) -> list[Turn] | Rejection:
    """The turns of a row in the first of the formats that `spec` allows and whose columns the row has."""
    # In a table of several shapes every row has all columns, those of the other shapes without a value.
    present = {name: value for name, value in row.items() if value is not None}
    return _first_shape(present, spec) or _first_shape(row, spec) or _no_shape(row, spec)


def _no_shape(row: dict[str, Any], spec: DatasetSpec) -> Rejection:
    return Rejection("wrong_shape", f"no {spec.format} row; its columns: {', '.join(map(ascii, row))[:200]}")


def _first_shape(row: dict[str, Any], spec: DatasetSpec) -> list[Turn] | Rejection | None:
    for name, find in (
        ("sharegpt", _sharegpt),
        ("messages", _messages),
        ("prompt_response", _pair),
        ("alpaca", _alpaca),
    ):
        if spec.format in ("auto", name) or (spec.format, name) == ("prompt", "prompt_response"):
            found = find(row, spec)
            if found is not None:
                return found
    return None


def _sharegpt(row: dict[str, Any], spec: DatasetSpec) -> list[Turn] | Rejection | None:
    return _chat(row, spec, spec.columns.conversations, "from", "value")


def _messages(row: dict[str, Any], spec: DatasetSpec) -> list[Turn] | Rejection | None:
    found = _chat(row, spec, spec.columns.messages, "role", "content")
    # The `conversations` column of many data sets holds messages.
    return _chat(row, spec, spec.columns.conversations, "role", "content") if found is None else found


def _chat(
    row: dict[str, Any], spec: DatasetSpec, column_name: str, role: str, content: str
) -> list[Turn] | Rejection | None:
    turns = _find(row, column_name)
    if turns is _MISSING:
        return None
    if not isinstance(turns, list):
        return Rejection("wrong_shape", f"{column_name} is {type(turns).__name__}, expected a list of turns")
    if not turns:
        return Rejection("empty", f"{column_name} has no turns")
    if not all(isinstance(turn, dict) for turn in turns) or not any(role in turn for turn in turns):
        return None
    if missing := [i for i, turn in enumerate(turns) if role not in turn]:
        return Rejection("wrong_shape", f"turn {missing[0]} has no {role}")
    return _read_chat(turns, role, content, spec.tool_turns)


def _read_chat(turns: list[dict[str, Any]], role: str, content: str, tool_turns: str) -> list[Turn] | Rejection:
    found: list[Turn] = []
    for position, turn in enumerate(turns):
        text = _text(turn.get(content))
        if isinstance(text, Rejection):
            return Rejection(text.reason, f"turn {position} {text.detail}")
        calls = [turn[key] for key in _CALL_KEYS if turn.get(key)]
        name = turn[role].strip().lower() if isinstance(turn[role], str) else turn[role]
        is_tool = bool(calls) or name in (*_CALL_ROLES, *_RESULT_ROLES)
        if is_tool and tool_turns == "reject":
            return Rejection("tool_turn", f"turn {position} ({str(turn[role])[:80]!r}) is a tool's call or result")
        if name in _RESULT_ROLES:
            found.append(Turn("user", text, is_tool_result=True))
        else:
            parts = [*([text] if text else []), *(json.dumps(c, ensure_ascii=False, default=str) for c in calls)]
            found.append(Turn("assistant" if is_tool else turn[role], "\n".join(parts) if calls else text))
    return list(_merge_results(found))


def _merge_results(turns: list[Turn]) -> Iterator[Turn]:
    """Joins the results of calls that were made at once into one user turn."""
    pending: Turn | None = None
    for turn in turns:
        both = pending and pending.is_tool_result and turn.is_tool_result
        if pending and both and isinstance(pending.content, str) and isinstance(turn.content, str):
            pending = Turn(pending.role, f"{pending.content}\n{turn.content}", True)
            continue
        if pending:
            yield pending
        pending = turn
    if pending:
        yield pending


def _text(content: Any) -> Any:
    """The text of a list of content parts; anything else as it is."""
    if not isinstance(content, list) or not content or not all(isinstance(part, dict) for part in content):
        return content
    others = [part.get("type") for part in content if not isinstance(part.get("text"), str)]
    if others:
        return Rejection("not_text", f"has a part of type {str(others[0])[:80]!r}")
    return "".join(part["text"] for part in content)


def _pair(row: dict[str, Any], spec: DatasetSpec) -> list[Turn] | Rejection | None:
    columns = spec.columns
    prompt, response = _find(row, columns.prompt), _find(row, columns.response)
    if prompt is _MISSING or (response is _MISSING and spec.format == "prompt_response"):
        return None
    answer = None if response is _MISSING or spec.format == "prompt" else response
    return _single(row, columns, prompt, answer)


def _alpaca(row: dict[str, Any], spec: DatasetSpec) -> list[Turn] | Rejection | None:
    columns = spec.columns
    instruction, subject = _find(row, columns.instruction), column(row, columns.input)
    if instruction is _MISSING:
        return None
    if isinstance(subject, str) and subject.strip() and isinstance(instruction, str):
        instruction = f"{instruction}\n\n{subject}"
    elif subject is not None and not isinstance(subject, str):
        return Rejection("wrong_shape", f"{columns.input} is {type(subject).__name__}, expected text")
    return _single(row, columns, instruction, column(row, columns.output))


def _single(row: dict[str, Any], columns: ColumnsSpec, prompt: Any, answer: Any) -> list[Turn]:
    """System prompt, user, and the answer if there is one; a blank answer is none."""
    system = column(row, columns.system)
    turns = [Turn("system", system), Turn("user", prompt), Turn("assistant", answer)]
    return [turn for turn in turns if turn.role == "user" or not _is_blank(turn.content)]


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
