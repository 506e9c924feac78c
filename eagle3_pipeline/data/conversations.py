"""Normalises rows to conversations, or says why not."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from eagle3_pipeline.store.fingerprint import digest

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
}
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
CONVERSATION_SCHEMA = pa.schema(
    [("conversation_id", pa.string()), ("row_number", pa.int64()), ("messages", pa.list_(_MESSAGE))]
)
REJECTED_SCHEMA = pa.schema(
    [("row_number", pa.int64()), ("reason", pa.string()), ("detail", pa.string()), ("raw", pa.string())]
)
CONTENT_COLUMNS = ("conversation_id", "messages")


@dataclass(frozen=True)
class Rejection:
    """Why a row is not used."""

    reason: str
    detail: str


Message = dict[str, str]


def normalise(row: dict[str, Any], row_format: str) -> list[Message] | Rejection:
    """Turns a row into `[{role, content}]` with roles system (first only), user, assistant in alternation.

    Args:
        row: the decoded row.
        row_format: auto, sharegpt (`conversations` of from/value), messages (`messages` of role/content), prompt.
    """
    turns = _turns(row, row_format)
    if isinstance(turns, Rejection):
        return turns
    messages: list[Message] = []
    for position, (role, content) in enumerate(turns):
        problem = _check_turn(position, role, content)
        if problem:
            return problem
        messages.append({"role": _ROLES[role.strip().lower()], "content": content})
    return _check_order(messages) or messages


def _turns(row: dict[str, Any], row_format: str) -> list[tuple[Any, Any]] | Rejection:
    for name, column, role, content in (
        ("sharegpt", "conversations", "from", "value"),
        ("messages", "messages", "role", "content"),
        ("messages", "conversations", "role", "content"),
    ):
        if row_format not in ("auto", name) or column not in row:
            continue
        turns = row[column]
        if not isinstance(turns, list):
            return Rejection("wrong_shape", f"{column} is {type(turns).__name__}, expected a list of turns")
        if not turns:
            return Rejection("empty", f"{column} has no turns")
        if all(isinstance(t, dict) and role in t and content in t for t in turns):
            return [(t[role], t[content]) for t in turns]
    if row_format in ("auto", "prompt") and "prompt" in row:
        system = [("system", row["system"])] if row.get("system") else []
        return [*system, ("user", row["prompt"])]
    return Rejection("wrong_shape", f"no {row_format} row; its columns: {', '.join(map(ascii, row))[:200]}")


def _check_turn(position: int, role: Any, content: Any) -> Rejection | None:
    if not isinstance(role, str) or role.strip().lower() not in _ROLES:
        return Rejection("bad_role", f"turn {position} has role {str(role)[:80]!r}")
    if not isinstance(content, str):
        return Rejection("wrong_shape", f"turn {position} has content of type {type(content).__name__}")
    if not content.strip():
        return Rejection("empty", f"turn {position} is empty")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        return Rejection("invalid_text", f"turn {position} is not valid Unicode: {error.reason}")
    return None


def _check_order(messages: list[Message]) -> Rejection | None:
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if not turns:
        return Rejection("no_user_turn", "only a system message")
    for position, message in enumerate(turns):
        expected = "user" if position % 2 == 0 else "assistant"
        if message["role"] != expected:
            return Rejection("not_alternating", f"turn {position} is {message['role']}, expected {expected}")
    return None


def conversation_id(messages: list[Message]) -> str:
    """Identity of a conversation: a hash of its turns."""
    return digest([[m["role"], m["content"]] for m in messages])
