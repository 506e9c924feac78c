"""Evaluation prompts by category."""

import json
from dataclasses import dataclass
from pathlib import Path

from eagle3_pipeline.config import expand
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.store.fingerprint import digest

_BUILTIN = "builtin:"


@dataclass(frozen=True)
class EvaluationPrompt:
    """One held-out prompt."""

    category: str
    prompt: str

    @property
    def identity(self) -> str:
        """Identity of the prompt in its category."""
        return digest([self.category, self.prompt])


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
        ConfigError: a line is not `{"category": text, "prompt": text}`, a prompt occurs twice, or there is none.
    """
    prompts = []
    for number, line in enumerate(read_prompt_bytes(location).splitlines(), 1):
        where = f"evaluation.prompts: {prompts_path(location)} line {number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = EvaluationPrompt(str(row["category"]), str(row["prompt"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f'{where}: expected {{"category": ..., "prompt": ...}}: {error}') from error
        if prompt in prompts:
            raise ConfigError(f"{where}: this prompt occurs twice")
        prompts.append(prompt)
    if not prompts:
        raise ConfigError(f"evaluation.prompts: {prompts_path(location)} holds no prompt")
    return prompts
