"""Renders conversations with the tokenizer's chat template and keeps its token ids."""

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from eagle3_pipeline.data.conversations import Message
from eagle3_pipeline.errors import ConfigError, TemplateRefusedError, with_causes


class ChatTemplate:
    """A verifier's tokenizer and template.

    Args:
        tokenizer: the tokenizer.
        template: a template that replaces its own.
        kwargs: further arguments of the template.
        stop_tokens: tokens besides EOS that end a turn, by their text.
        stop_ids: the same, by their ids.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        kwargs: dict[str, Any],
        stop_tokens: list[str],
        stop_ids: Iterable[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._kwargs = kwargs
        self.stop_token_ids = sorted({self._stop_id(text) for text in stop_tokens} | self._eos_ids() | set(stop_ids))

    def _eos_ids(self) -> set[int]:
        eos = self._tokenizer.eos_token_id
        return set() if eos is None else {eos}

    def _stop_id(self, text: str) -> int:
        token = self._tokenizer.convert_tokens_to_ids(text)
        if token is None or token == self._tokenizer.unk_token_id:
            raise ConfigError(f"verifier.stop_tokens: {text!r} is not a token of this verifier's tokenizer")
        return token

    def render(self, messages: list[Message], generation_prompt: bool) -> str:
        """The text of a conversation, with the opening of the next answer if `generation_prompt`.

        Raises:
            TemplateRefusedError: the tokenizer has no chat template, or the template refuses the conversation.
        """
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # templates raise whatever they like through Jinja
            raise TemplateRefusedError(
                f"the chat template refused a conversation of {len(messages)} turns: {with_causes(error)}"
            ) from error

    def unstopped_end(self) -> str | None:
        """What the template writes behind an answer, if no token of it would stop the verifier; `None`: one does.

        Raises:
            TemplateRefusedError: as `render`.
        """
        answer = "answer"
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        end = self.render(messages, generation_prompt=False).rpartition(answer)[2]
        stopped = any(token in self.stop_token_ids for token in self.encode(end))
        return None if stopped or not end.strip() else end

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template already wrote the special tokens."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def encode_with_offsets(self, text: str, boundaries: list[int]) -> tuple[list[int], list[int]] | None:
        """Token ids, and where in the text each token starts.

        A tokenizer that is Python code knows no offsets: its tokens are told apart by tokenising the text in parts.

        Args:
            text: rendered text.
            boundaries: ascending character offsets; of a token it matters only between which of them it starts.

        Returns:
            Ids and offsets; `None` if a token crosses a boundary, and so belongs to no side.
        """
        if self._tokenizer.is_fast:
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return encoded["input_ids"], [start for start, _ in encoded["offset_mapping"]]
        cuts = [0, *boundaries, len(text)]
        parts = [(start, self.encode(text[start:end])) for start, end in pairwise(cuts) if end > start]
        ids = [token for _, part in parts for token in part]
        return (ids, [start for start, part in parts for _ in part]) if ids == self.encode(text) else None

    def decode(self, ids: list[int]) -> str:
        """Text of sampled ids, special tokens kept."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@functools.lru_cache(maxsize=4)
def load_tokenizer(path: str, trust_remote_code: bool) -> Any:
    """The tokenizer of a local model folder, loaded once per process.

    Raises:
        ConfigError: it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # Transformers raises many types for one condition: unusable tokenizer files
        raise ConfigError(f"cannot load the tokenizer of {path}: {with_causes(error)}") from error
