"""Shapes of rows: chats, prompt and response, Alpaca's columns; tool calls and content parts as text."""

import datetime
import decimal
import json
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from eagle3_pipeline.config import ColumnsSpec, DatasetSpec
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.data.table_rows import TableRow

_CALL_ROLES = ("function_call", "tool_call")
_RESULT_ROLES = ("tool", "function", "observation", "tool_response", "ipython")
_CALL_KEYS = ("tool_calls", "function_call")
_MISSING = object()


# Keys of a turn that are read, by any of the formats.
_READ_KEYS = {"role", "from", "content", "value", *_CALL_KEYS}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# Texts that stand for "nothing" where an object or a list would be.
_NONE_TEXTS = ("", "null", "none", "[]", "{}")


@dataclass(frozen=True)
class Turn:
    """A turn as the row has it; `content` is whatever was found where text should be."""

    role: Any
    content: Any
    is_tool_result: bool = False
    reasoning: Any = None


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
    present = type(row)({name: value for name, value in row.items() if value is not None})
    return _first_shape(present, spec) or _first_shape(row, spec) or _no_shape(row, spec)


def _no_shape(row: dict[str, Any], spec: DatasetSpec) -> Rejection:
    names = [*row, *getattr(row, "unread", ())]
    chats = (spec.columns.messages, spec.columns.conversations)
    found = [f"{name} is {_kind(value)}" for name in chats if (value := column(row, name)) is not None]
    what = f"; {', '.join(found)[:200]}" if found else ""
    return Rejection("wrong_shape", f"no {spec.format} row; its columns: {', '.join(map(ascii, names))[:200]}{what}")


def _kind(value: Any) -> str:
    """What a value is, in words: a list of what, an object of which keys."""
    if isinstance(value, list | tuple):
        return f"a list of {_kind_word(value[0])}" if value else "an empty list"
    if isinstance(value, dict):
        return f"an object of {', '.join(ascii(str(key)) for key in list(value)[:5])}"
    return _kind_word(value)


def _kind_word(value: Any) -> str:
    return {"str": "text", "dict": "object", "NoneType": "null"}.get(type(value).__name__, type(value).__name__)


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
    turns = _as_list(turns)
    if not isinstance(turns, list):
        return Rejection("wrong_shape", f"{column_name} is {type(turns).__name__}, expected a list of turns")
    if not turns:
        return Rejection("empty", f"{column_name} has no turns")
    if not all(isinstance(turn, dict) for turn in turns) or not any(role in turn for turn in turns):
        return None
    if missing := [i for i, turn in enumerate(turns) if role not in turn]:
        return Rejection("wrong_shape", f"turn {missing[0]} has no {role}")
    return _read_chat(turns, role, content, spec, isinstance(row, TableRow))


def _as_list(turns: Any) -> Any:
    """Turns that are the JSON text of a list, or a list of JSON texts of objects, as what they say."""
    if isinstance(turns, str) and turns.lstrip().startswith("["):
        return _parsed(turns)
    if isinstance(turns, list) and turns and all(isinstance(t, str) and t.lstrip().startswith("{") for t in turns):
        return [_parsed(turn) for turn in turns]
    return turns


def _parsed(text: str) -> Any:
    """The list or object that a text is the JSON of; the text, if it is of none."""
    try:
        found = json.loads(text, object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, list | dict) else text


class DuplicateKeyError(ValueError):
    """An object names a key twice: which of the values is meant cannot be known."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; for `json.loads`.

    Raises:
        DuplicateKeyError: it names a key twice.
    """
    value = dict(pairs)
    if len(value) != len(pairs):
        raise DuplicateKeyError
    return value


def _calls(turn: dict[str, Any], in_table: bool) -> list[Any]:
    """A turn's calls of tools, whichever way they, or their absence, are spelled."""
    found = []
    for key in _CALL_KEYS:
        value = turn.get(key)
        if isinstance(value, str):
            value = None if _is_none(value) else _parsed(value)
        # In a table every call has the keys of all others.
        value = _without_nulls(value) if in_table else value
        if value and value is not True:
            found.append(value)
    return found


def _is_none(value: Any) -> bool:
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip().lower() in _NONE_TEXTS)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _spell_call(value: Any) -> str:
    """For `json.dumps`: of what JSON has no spelling for, what is always the same text."""
    if isinstance(value, datetime.date | datetime.time | decimal.Decimal | uuid.UUID):
        return str(value)
    raise TypeError(type(value).__name__)


def _reasoning(turn: dict[str, Any]) -> Any:
    return next((turn[key] for key in REASONING_KEYS if not _is_none(turn.get(key))), None)


def unread_keys(row: dict[str, Any], spec: DatasetSpec) -> Counter[str]:
    """Keys of a row's turns that say something and that nothing reads, and in how many turns each one is."""
    read = _READ_KEYS | (set(REASONING_KEYS) if spec.reasoning == "auto" else set())
    for name in (spec.columns.conversations, spec.columns.messages):
        turns = _as_list(column(row, name))
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            return Counter(
                str(key) for turn in turns for key, value in turn.items() if key not in read and not _is_none(value)
            )
    return Counter()


def _read_chat(
    turns: list[dict[str, Any]], role: str, content: str, spec: DatasetSpec, in_table: bool
) -> list[Turn] | Rejection:
    found: list[Turn] = []
    for position, turn in enumerate(turns):
        text = _text(turn.get(content))
        if isinstance(text, Rejection):
            return Rejection(text.reason, f"turn {position} {text.detail}")
        calls = _calls(turn, in_table)
        name = turn[role].strip().lower() if isinstance(turn[role], str) else turn[role]
        is_tool = bool(calls) or name in (*_CALL_ROLES, *_RESULT_ROLES)
        if is_tool and spec.tool_turns == "reject":
            return Rejection("tool_turn", f"turn {position} ({str(turn[role])[:80]!r}) is a tool's call or result")
        if name in _RESULT_ROLES:
            found.append(Turn("user", text, is_tool_result=True))
        else:
            try:
                told = [json.dumps(call, ensure_ascii=False, default=_spell_call) for call in calls]
            except (TypeError, ValueError) as error:
                return Rejection("wrong_shape", f"turn {position} has a call that JSON cannot spell: {error}")
            if calls and text is not None and not isinstance(text, str):
                return Rejection("wrong_shape", f"turn {position} has content of type {type(text).__name__}")
            parts = [*([text] if text else []), *told]
            reasoning = _reasoning(turn) if spec.reasoning == "auto" else None
            who = "assistant" if is_tool else turn[role]
            found.append(Turn(who, "\n".join(parts) if calls else text, reasoning=reasoning))
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
