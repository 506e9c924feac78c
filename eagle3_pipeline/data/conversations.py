"""Normalises rows to conversations, or says why not."""

from typing import Any

import pyarrow as pa

from eagle3_pipeline.config import DatasetSpec
from eagle3_pipeline.data.filters import check_language, check_length, check_row
from eagle3_pipeline.data.reasoning import without_reasoning
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.data.row_formats import read_turns
from eagle3_pipeline.store.fingerprint import digest

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}
_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
CONVERSATION_SCHEMA = pa.schema(
    [("conversation_id", pa.string()), ("row_number", pa.int64()), ("messages", pa.list_(_MESSAGE))]
)
REJECTED_SCHEMA = pa.schema(
    [("row_number", pa.int64()), ("reason", pa.string()), ("detail", pa.string()), ("raw", pa.string())]
)
CONTENT_COLUMNS = ("conversation_id", "messages")

Message = dict[str, str]


def normalise(row: dict[str, Any], spec: DatasetSpec) -> list[Message] | Rejection:
    """Turns a row into `[{role, content}]` with roles system (first only), user, assistant in alternation.

    An answer that has its reasoning apart from its content has a key `reasoning`, too.

    Args:
        row: the decoded row.
        spec: its format, columns and filters.

    Raises:
        ConfigError: a language that cannot be detected is asked for.
    """
    try:
        turns = check_row(row, spec) or read_turns(row, spec)
    except RecursionError:
        return Rejection("wrong_shape", "values are nested too deeply")
    if isinstance(turns, Rejection):
        return turns
    messages: list[Message] = []
    for position, turn in enumerate(turns):
        problem = _check_turn(position, turn.role, turn.content) or _check_text(position, turn.reasoning)
        if problem:
            return problem
        message = {"role": _ROLES[turn.role.strip().lower()], "content": turn.content}
        if message["role"] == "assistant" and turn.reasoning is not None:
            if not isinstance(turn.reasoning, str):
                kind = type(turn.reasoning).__name__
                return Rejection("wrong_shape", f"turn {position} has reasoning of type {kind}")
            message["reasoning"] = turn.reasoning
        messages.append(message)
    problem = _check_order(messages) or check_length(messages, spec.filters) or check_language(row, messages, spec)
    return problem or messages


def _check_turn(position: int, role: Any, content: Any) -> Rejection | None:
    if not isinstance(role, str) or role.strip().lower() not in _ROLES:
        return Rejection("bad_role", f"turn {position} has role {str(role)[:80]!r}")
    if not isinstance(content, str):
        return Rejection("wrong_shape", f"turn {position} has content of type {type(content).__name__}")
    if not content.strip():
        return Rejection("empty", f"turn {position} is empty")
    return _check_text(position, content)


def _check_text(position: int, content: Any) -> Rejection | None:
    try:
        (content if isinstance(content, str) else "").encode("utf-8")
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
    """Identity of a conversation: a hash of its turns, and of the reasoning of those that have some."""
    turns = [[m["role"], m["content"], *([m["reasoning"]] if m.get("reasoning") else [])] for m in messages]
    return digest(turns)


def prompt_ids(messages: list[Message]) -> list[tuple[int, bytes]]:
    """Identity of what is asked at each user turn: that turn and all before it, past answers without reasoning.

    Returns:
        (position of the turn, 16 bytes).
    """
    asked: list[list[str]] = []
    found = []
    for position, message in enumerate(messages):
        content = message["content"]
        asked.append([message["role"], without_reasoning(content) if message["role"] == "assistant" else content])
        if message["role"] == "user":
            found.append((position, bytes.fromhex(digest(asked))))
    return found


def conversation_schema(has_reasoning: bool) -> pa.Schema:
    """The schema of conversations: that of earlier releases, where no turn has reasoning."""
    if not has_reasoning:
        return CONVERSATION_SCHEMA
    message = pa.struct([*_MESSAGE, ("reasoning", pa.string())])
    return CONVERSATION_SCHEMA.set(2, pa.field("messages", pa.list_(message)))
