"""Evaluation prompts by category."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import expand
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.store.fingerprint import digest

_BUILTIN = "builtin:"


_EXPECTED = (
    'expected {"category": text, "prompt": text, a list of texts (the turns of the user), or a list of messages '
    '{"role": ..., "content": text}}'
)
_KEYS = ("prompt", "turns", "messages")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class EvaluationPrompt:
    """One held-out prompt, or a chat.

    Attributes:
        category: what it is counted under.
        prompt: the user's text; of a chat the last one.
        messages: the turns of a chat, each (role, text); empty: `prompt` is all there is. Every user turn without an
            answer behind it is one that the verifier answers, in turn.
    """

    category: str
    prompt: str
    messages: tuple[tuple[str, str], ...] = ()

    @property
    def identity(self) -> str:
        """Identity of the prompt in its category."""
        return digest([self.category, [list(turn) for turn in self.messages] if self.messages else self.prompt])

    @property
    def user_texts(self) -> list[str]:
        """What the user says, in order."""
        return [text for role, text in self.messages if role == "user"] or [self.prompt]


def prompts_path(location: str) -> Path:
    """The file behind `evaluation.prompts`."""
    if location.startswith(_BUILTIN):
        return Path(__file__).parent / f"{location.removeprefix(_BUILTIN)}_prompts.jsonl"
    return Path(expand(location)).expanduser()


def read_prompt_bytes(location: str) -> bytes:
    """The file's bytes, which enter the baseline's fingerprint.

    Raises:
        ConfigError: it cannot be read.
    """
    path = prompts_path(location)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"evaluation.prompts: {path} cannot be read: {error}") from error


def load_prompts(location: str) -> list[EvaluationPrompt]:
    """Prompts in the file's order.

    Raises:
        ConfigError: a line is no prompt as README describes them, a prompt occurs twice, or there is none.
    """
    prompts: list[EvaluationPrompt] = []
    for number, line in enumerate(read_prompt_bytes(location).splitlines(), 1):
        where = f"evaluation.prompts: {prompts_path(location)} line {number}"
        if not line.strip():
            continue
        try:
            prompt = _read_prompt(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: {_EXPECTED}: {error}") from error
        if prompt in prompts:
            raise ConfigError(f"{where}: this prompt occurs twice")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"evaluation.prompts: {prompts_path(location)} holds no prompt")
    return prompts


def _read_prompt(row: Any) -> EvaluationPrompt:
    """The prompt of a line; a `ValueError` says what it is not."""
    if not isinstance(row, dict):
        raise ValueError(f"the line is {type(row).__name__}, no object")
    category = row.get("category")
    if not isinstance(category, str):
        raise ValueError(f"'category' is {_kind(row, 'category')}, expected text")
    given = [key for key in _KEYS if row.get(key) is not None]
    if not given:
        raise ValueError(f"'prompt' is {_kind(row, 'prompt')}")
    if len(given) > 1:
        raise ValueError(f"{' and '.join(map(repr, given))} are given, expected one of them")
    key, value = given[0], row[given[0]]
    if isinstance(value, str) and key == "prompt":
        return EvaluationPrompt(category, value)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{key!r} is {'an empty list' if value == [] else type(value).__name__}")
    turns = [_read_turn(key, position, turn) for position, turn in enumerate(value)]
    _check_order(key, turns)
    if len(turns) == 1:
        return EvaluationPrompt(category, turns[0][1])
    return EvaluationPrompt(category, turns[-1][1], tuple(turns))


def _kind(row: dict[str, Any], key: str) -> str:
    return "missing" if key not in row else "null" if row[key] is None else type(row[key]).__name__


def _read_turn(key: str, position: int, turn: Any) -> tuple[str, str]:
    where = f"{key!r} turn {position}"
    role: Any = "user"
    text = turn
    if isinstance(turn, dict):
        role, text = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"{where} has role {role!r}, expected one of {', '.join(_ROLES)}")
    if not isinstance(text, str):
        raise ValueError(f"{where} is {type(text).__name__}, expected text")
    if not text.strip():
        raise ValueError(f"{where} is empty")
    return _ROLES[role], text


def _check_order(key: str, turns: list[tuple[str, str]]) -> None:
    roles = [role for role, _ in turns]
    if "system" in roles[1:]:
        raise ValueError(f"{key!r}: a system turn that is not the first")
    if roles[-1] != "user":
        raise ValueError(f"{key!r} ends with a turn of the {roles[-1]}, expected the user's: that one is answered")
    for position, role in enumerate(roles):
        if role == "assistant" and (not position or roles[position - 1] != "user"):
            raise ValueError(f"{key!r} turn {position} is the assistant's and follows no turn of the user")
