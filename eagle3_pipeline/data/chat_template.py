"""Renders conversations with the tokenizer's chat template and keeps its token ids."""

import datetime
import functools
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from eagle3_pipeline.data.conversations import Message
from eagle3_pipeline.data.reasoning import HARMONY, KNOWN_MARKS, THINK, Marks, join_reasoning, named_marks
from eagle3_pipeline.data.template_text import CLOCK, clock_of, read_variables, settable_variables
from eagle3_pipeline.errors import ConfigError, TemplateRefusedError, with_causes

TEMPLATE_DATE = datetime.date(2026, 1, 1)
# Keys of a message under which families expect an answer's reasoning.
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_PROBE_REASONING, _PROBE_ANSWER = "reasonedso", "answeredso"
_MOST_TOLD = 5


class ChatTemplate:
    """A verifier's tokenizer and template.

    Args:
        tokenizer: the tokenizer.
        template: a template that replaces its own.
        kwargs: further arguments of the template.
        stop_tokens: tokens besides EOS that end a turn, by their text.
        stop_ids: the same, by their ids.
        vocab_size: V; ids from here on are none of the verifier's. `None`: unknown.
        date: what a template that asks for the clock is told.
        marks: start and end of reasoning; `None`: as found in the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None,
        kwargs: dict[str, Any],
        stop_tokens: list[str],
        stop_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        date: datetime.date = TEMPLATE_DATE,
        marks: Iterable[str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._text = template if template is not None else _own_text(tokenizer)
        self._given = kwargs
        self._kwargs = ({CLOCK: clock_of(date)} if _names_clock(self._text) else {}) | kwargs
        self._vocab_size = vocab_size
        self._given_marks = tuple(marks) if marks is not None else None
        self.stop_token_ids = sorted({self._stop_id(text) for text in stop_tokens} | self._eos_ids() | set(stop_ids))

    def check_arguments(self) -> None:
        """Refuses arguments that have no effect on this template, or another one than their text says.

        Raises:
            ConfigError: names the argument and those that the template uses.
        """
        _check_kwargs(self._given, self._text, _renders_by_itself(self._tokenizer))

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
                [self._as_read(message) for message in messages],
                chat_template=self._template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        except Exception as error:  # templates raise whatever they like through Jinja
            raise TemplateRefusedError(
                f"the chat template refused a conversation of {len(messages)} turns: {with_causes(error)}"
            ) from error

    def _as_read(self, message: Message) -> dict[str, str]:
        """A message with its reasoning where this template looks for it, else in marks before the answer."""
        plain = {"role": message["role"], "content": message["content"]}
        reasoning = message.get("reasoning")
        if not reasoning:
            return plain
        if self._reasoning_keys:
            return plain | dict.fromkeys(self._reasoning_keys, reasoning)
        return plain | {"content": join_reasoning(reasoning, message["content"], self.marks, self._space)}

    @functools.cached_property
    def _reasoning_keys(self) -> list[str]:
        # As an attribute or a key of a message; not every word "thinking" of a template's own text.
        read = r"\w\.{0}\b|[\[(]\s*['\"]{0}['\"]|['\"]{0}['\"]\s+in\b"
        return [key for key in REASONING_KEYS if re.search(read.format(key), self._text)]

    @functools.cached_property
    def marks(self) -> Marks:
        """What this verifier writes around its reasoning.

        As `verifier.reasoning_marks` say; else as the template renders an answer with reasoning; else the known marks
        that the template names, or whose texts are tokens.
        """
        if self._given_marks:
            return Marks(*self._given_marks)
        if rendered := self._rendered_marks():
            return rendered
        if named := named_marks(self._text):
            return named
        known = (marks for marks in KNOWN_MARKS if all(map(self._is_token, marks)))
        return next(known, THINK)

    def _is_token(self, text: str) -> bool:
        token = self._tokenizer.convert_tokens_to_ids(text)
        return token is not None and token != self._tokenizer.unk_token_id

    def _rendered_marks(self) -> Marks | None:
        """What stands before and behind the reasoning of a last answer, if the template reads reasoning."""
        if not self._reasoning_keys:
            return None
        question = [{"role": "user", "content": "question"}]
        answer = {"role": "assistant", "content": _PROBE_ANSWER}
        try:
            opening = self.render(question, generation_prompt=True)
            plain = self.render([*question, answer], generation_prompt=False)
            text = self.render([*question, {**answer, "reasoning": _PROBE_REASONING}], generation_prompt=False)
        except TemplateRefusedError:
            return None
        before, found, behind = text.partition(_PROBE_REASONING)
        between, answered, _ = behind.partition(_PROBE_ANSWER)
        if not found or not answered:
            return None
        if HARMONY.start in before and HARMONY.end in between:
            return HARMONY
        # An opening may hold the start already, and an answer without reasoning an empty one.
        start = next((m.start for m in KNOWN_MARKS if before.rstrip().endswith(m.start)), "")
        if not start:
            start = before[_common(before, opening) :] or before[_common(before, plain) :]
        return Marks(start.strip(), between.strip()) if start.strip() and between.strip() else None

    @functools.cached_property
    def _space(self) -> str:
        start = re.escape(self.marks.start)
        return "\n" if re.search(rf"{start}(\n|\\n)", self._text) else ""

    def is_thinking(self, opening: str) -> bool:
        """Whether the text of a prompt's end has begun the reasoning already."""
        return opening.rstrip().endswith(self.marks.start)

    def answer_end(self) -> str:
        """What the template writes behind an answer.

        Raises:
            TemplateRefusedError: as `render`.
        """
        answer = "answer"
        messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        return self.render(messages, generation_prompt=False).rpartition(answer)[2]

    def unstopped_end(self) -> str | None:
        """What the template writes behind an answer, if no token of it would stop the verifier; `None`: one does.

        Raises:
            TemplateRefusedError: as `render`.
        """
        end = self.answer_end()
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

    def outside_vocabulary(self, ids: list[int]) -> str | None:
        """The first id that is none of the verifier's, with its token; `None`: all are.

        vLLM dies of such an id.
        """
        size = self._vocab_size
        wrong = next((i for i in ids if size is not None and not 0 <= i < size), None)
        if wrong is None:
            return None
        token = self._tokenizer.convert_ids_to_tokens(wrong) if wrong >= 0 else None
        return f"token id {wrong} ({token!r}), the verifier's vocabulary has ids 0 to {size - 1:,}" if size else None

    def describe_vocabulary(self) -> str:
        """The tokenizer's largest id beside the verifier's, and the tokens that the verifier has no row for."""
        known = self._tokenizer.get_vocab()
        largest, size = max(known.values(), default=-1), self._vocab_size or 0
        outside = sorted((number, token) for token, number in known.items() if number >= size)
        if not outside:
            return f"largest id {largest:,}, the verifier has ids 0 to {size - 1:,}"
        told = ", ".join(f"{token!r} ({number})" for number, token in outside[:_MOST_TOLD])
        more = f" and {len(outside) - _MOST_TOLD:,} more" if len(outside) > _MOST_TOLD else ""
        return (
            f"largest id {largest:,}, the verifier has ids 0 to {size - 1:,}; turns that hold {told}{more} are "
            "rejected as outside_vocabulary"
        )


def _common(one: str, two: str) -> int:
    """Length of what two texts begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def _own_text(tokenizer: Any) -> str:
    """The tokenizer's default template; empty: it has none, or renders in Python."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("default")
    return found if isinstance(found, str) else ""


def _names_clock(text: str) -> bool:
    return CLOCK in text and CLOCK in read_variables(text)


def _renders_by_itself(tokenizer: Any) -> bool:
    """Whether the tokenizer's own code decides what becomes of the arguments."""
    method = getattr(type(tokenizer), "apply_chat_template", None)
    return not str(getattr(method, "__module__", "")).startswith("transformers.tokenization_utils_base")


def _check_kwargs(kwargs: dict[str, Any], text: str, by_itself: bool) -> None:
    for name, value in kwargs.items():
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            raise ConfigError(
                f"generation.chat_template_kwargs.{name} is the text {value!r}; a template takes every text for true: "
                f"write {value.strip().lower()} without quotes"
            )
    # A tokenizer's own code may read more than its template.
    if not kwargs or not text or by_itself:
        return
    used = settable_variables(text)
    if unused := [name for name in kwargs if name not in used]:
        raise ConfigError(
            f"generation.chat_template_kwargs: {', '.join(unused)}: this verifier's chat template does not use it; it "
            f"uses {', '.join(used) or 'no variable of its own'}"
        )


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
