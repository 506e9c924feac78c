"""Training sequences: prompts to answer, answers as they were sampled, masks, token counts."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from eagle3_pipeline.config import GenerationSpec
from eagle3_pipeline.data.chat_template import ChatTemplate
from eagle3_pipeline.data.conversations import Message
from eagle3_pipeline.data.reasoning import split_reasoning, without_reasoning
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.errors import TemplateRefusedError
from eagle3_pipeline.store.fingerprint import digest, token_lists_id

SEQUENCE_SCHEMA = pa.schema(
    [
        ("sequence_id", pa.string()),
        ("conversation_id", pa.string()),
        ("turn", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("num_prompt_tokens", pa.int32()),
        ("text", pa.string()),
        ("reasoning", pa.string()),
        ("finish_reason", pa.string()),
        ("mean_logprob", pa.float32()),
        # What its conversation begins with; none: an earlier release wrote the file.
        ("root", pa.string()),
    ]
)
CONTENT_COLUMNS = ("sequence_id", "input_ids", "loss_mask")
TOKEN_COUNT_SCHEMA = pa.schema([("token_id", pa.int32()), ("count", pa.int64())])
REJECTED_SCHEMA = pa.schema(
    [("conversation_id", pa.string()), ("turn", pa.int32()), ("reason", pa.string()), ("detail", pa.string())]
)
DUPLICATE = "duplicate_prompt"
# A marker that is no token of its own takes a few.
_OPENING_TOKENS = 16


@dataclass(frozen=True)
class Prompt:
    """What the verifier is asked: the ids of a conversation up to the opening of an answer."""

    sequence_id: str
    conversation_id: str
    turn: int
    input_ids: list[int]


@dataclass(frozen=True)
class Sequence:
    """One training row. `loss_mask[i]` is true where token i is trained on."""

    sequence_id: str
    conversation_id: str
    turn: int
    input_ids: list[int]
    loss_mask: list[bool]
    num_prompt_tokens: int
    text: str
    reasoning: str
    finish_reason: str
    mean_logprob: float | None = None


@dataclass(frozen=True)
class RejectedTurn:
    """A turn that gives no training sequence."""

    conversation_id: str
    turn: int
    rejection: Rejection

    def row(self) -> dict[str, Any]:
        """A row of `rejected.parquet`."""
        return {
            "conversation_id": self.conversation_id,
            "turn": self.turn,
            "reason": self.rejection.reason,
            "detail": self.rejection.detail,
        }


def sequence_id(conversation_id: str, turn: int) -> str:
    """Identity of the answer to turn `turn` of a conversation."""
    return digest([conversation_id, turn])


def make_prompts(
    conversation_id: str, messages: list[Message], template: ChatTemplate, spec: GenerationSpec
) -> list[Prompt | RejectedTurn]:
    """One prompt per user turn, with the data set's own turns before it, less their reasoning, as history."""
    prompts: list[Prompt | RejectedTurn] = []
    for turn, message in enumerate(messages):
        if message["role"] != "user":
            continue
        history = [*_without_reasoning(messages[:turn], template), message]
        try:
            ids = template.encode(template.render(history, generation_prompt=True))
        except TemplateRefusedError as error:
            prompts.append(RejectedTurn(conversation_id, turn, Rejection("template_refused", str(error))))
            continue
        needed = len(ids) + spec.max_new_tokens
        if outside := template.outside_vocabulary(ids):
            prompts.append(RejectedTurn(conversation_id, turn, Rejection("outside_vocabulary", outside)))
        elif needed > spec.max_sequence_tokens:
            detail = f"{len(ids)} prompt tokens + {spec.max_new_tokens} new > {spec.max_sequence_tokens}"
            prompts.append(RejectedTurn(conversation_id, turn, Rejection("too_long", detail)))
        else:
            prompts.append(Prompt(sequence_id(conversation_id, turn), conversation_id, turn, ids))
    return prompts


def distinct_prompts(
    items: Iterable[Prompt | RejectedTurn], asked_before: Collection[tuple[str, int]] = ()
) -> list[Prompt | RejectedTurn]:
    """Each different prompt once: logs hold a whole history in every request, and data sets several answers to one.

    Args:
        items: of a chunk, in order.
        asked_before: (conversation, turn) of those that an earlier chunk asks for.
    """
    first: dict[bytes, str] = {}
    found: list[Prompt | RejectedTurn] = []
    for item in items:
        if not isinstance(item, Prompt):
            found.append(item)
            continue
        ids = np.asarray(item.input_ids, dtype=np.int32).tobytes()
        if (item.conversation_id, item.turn) in asked_before:
            where = "an earlier chunk"
        elif ids in first:
            where = f"conversation {first[ids]} of this chunk"
        else:
            first[ids] = item.conversation_id
            found.append(item)
            continue
        rejection = Rejection(DUPLICATE, f"the same prompt is in {where}")
        found.append(RejectedTurn(item.conversation_id, item.turn, rejection))
    return found


def root_of(messages: list[Message], template: ChatTemplate) -> str | None:
    """Identity of what a conversation begins with: the prompt of its first user turn; `None`: none can be rendered."""
    first = next((turn for turn, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return None
    try:
        return token_lists_id([template.encode(template.render(messages[: first + 1], generation_prompt=True))])
    except TemplateRefusedError:
        return None


def sequence_from_answer(
    prompt: Prompt, answer: dict[str, Any], template: ChatTemplate, spec: GenerationSpec
) -> Sequence | RejectedTurn:
    """Joins a prompt and the sampled ids; the ids are kept as sampled, never tokenised again.

    Args:
        prompt: what was asked.
        answer: `token_ids`, `finish_reason`, `cumulative_logprob` as the engine returned them.
        template: for the text columns only.
        spec: decides what happens to truncated answers.
    """
    sampled = answer["token_ids"]
    if not sampled:
        rejection = Rejection("no_supervised_tokens", "the verifier answered with no token")
        return RejectedTurn(prompt.conversation_id, prompt.turn, rejection)
    if answer["finish_reason"] == "length" and spec.truncated == "drop":
        rejection = Rejection("truncated_generation", f"cut at {len(sampled)} tokens")
        return RejectedTurn(prompt.conversation_id, prompt.turn, rejection)
    is_thinking = template.is_thinking(template.decode(prompt.input_ids[-_OPENING_TOKENS:]))
    reasoning, text = split_reasoning(template.decode(sampled), [template.marks], is_thinking)
    logprob = answer.get("cumulative_logprob")
    return Sequence(
        prompt.sequence_id,
        prompt.conversation_id,
        prompt.turn,
        [*prompt.input_ids, *sampled],
        [False] * len(prompt.input_ids) + [True] * len(sampled),
        len(prompt.input_ids),
        text,
        reasoning,
        answer["finish_reason"],
        None if logprob is None else logprob / len(sampled),
    )


def _without_reasoning(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """History as a verifier sees it: of past answers only what follows their reasoning."""
    return [
        {"role": m["role"], "content": without_reasoning(m["content"], [template.marks])}
        if m["role"] == "assistant"
        else m
        for m in messages
    ]


def passthrough_sequences(
    conversation_id: str, messages: list[Message], template: ChatTemplate, spec: GenerationSpec
) -> list[Sequence | RejectedTurn]:
    """Sequences that keep the data set's answers.

    One sequence for the whole conversation where history is rendered as the answers were; else (answers with reasoning,
    which no verifier sees again in later turns) one per assistant turn.
    """
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return [RejectedTurn(conversation_id, 0, Rejection("no_assistant_turn", "nothing to train on"))]
    try:
        return _passthrough(conversation_id, messages, answers, template, spec)
    except TemplateRefusedError as error:
        return [RejectedTurn(conversation_id, answers[-1], Rejection("template_refused", str(error)))]


def _passthrough(
    conversation_id: str,
    messages: list[Message],
    answers: list[int],
    template: ChatTemplate,
    spec: GenerationSpec,
) -> list[Sequence | RejectedTurn]:
    last = answers[-1]
    whole = template.render(messages[: last + 1], generation_prompt=False)
    spans = [_answer_span(messages, turn, template) for turn in answers]
    if all(span and whole.startswith(span[0] + span[1]) for span in spans):
        groups = [(last, whole, [s for s in spans if s])]
    else:
        groups = [(t, s[0] + s[1], [s]) for t, s in zip(answers, spans, strict=True) if s]
    result = [_mask_spans(conversation_id, turn, text, found, template, spec) for turn, text, found in groups]
    missed = [t for t, s in zip(answers, spans, strict=True) if s is None]
    detail = "the rendered answer does not start with its generation prompt"
    return result + [RejectedTurn(conversation_id, t, Rejection("template_mismatch", detail)) for t in missed]


def _answer_span(messages: list[Message], turn: int, template: ChatTemplate) -> tuple[str, str] | None:
    """The rendered text before the answer at `turn`, and the answer with its end marker."""
    history = _without_reasoning(messages[:turn], template)
    before = template.render(history, generation_prompt=True)
    through = template.render([*history, messages[turn]], generation_prompt=False)
    return (before, through[len(before) :]) if through.startswith(before) else None


def _mask_spans(
    conversation_id: str,
    turn: int,
    text: str,
    spans: list[tuple[str, str]],
    template: ChatTemplate,
    spec: GenerationSpec,
) -> Sequence | RejectedTurn:
    boundaries = [end for before, answer in spans for end in (len(before), len(before) + len(answer))]
    encoded = template.encode_with_offsets(text, boundaries)
    if encoded is None:
        detail = "the tokenizer joins the end of an answer, or its beginning, with what is beside it"
        return RejectedTurn(conversation_id, turn, Rejection("template_mismatch", detail))
    ids, starts = encoded
    if outside := template.outside_vocabulary(ids):
        return RejectedTurn(conversation_id, turn, Rejection("outside_vocabulary", outside))
    if len(ids) > spec.max_sequence_tokens:
        detail = f"{len(ids)} tokens > {spec.max_sequence_tokens}"
        return RejectedTurn(conversation_id, turn, Rejection("too_long", detail))
    mask = [False] * len(ids)
    for before, answer in spans:
        inside = [i for i, s in enumerate(starts) if len(before) <= s < len(before) + len(answer)]
        stops = [i for i in inside if ids[i] in template.stop_token_ids]
        for i in inside:
            # What the template writes behind the end of the turn (a newline, say) is never sampled.
            mask[i] = not stops or i <= stops[-1]
        # Families whose turns have no end marker stop at the mark that begins the next turn.
        behind = inside[-1] + 1 if inside else len(ids)
        if not stops and behind < len(ids) and ids[behind] in template.stop_token_ids:
            mask[behind] = True
    if not any(mask):
        return RejectedTurn(conversation_id, turn, Rejection("no_supervised_tokens", "the mask is empty"))
    reasoning, answer_text = split_reasoning(spans[-1][1], [template.marks])
    identity = sequence_id(conversation_id, turn)
    return Sequence(identity, conversation_id, turn, ids, mask, mask.index(True), answer_text, reasoning, "data")


def count_supervised(sequences: list[Sequence]) -> Counter[int]:
    """How often each token is trained on."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(t for t, m in zip(sequence.input_ids, sequence.loss_mask, strict=True) if m)
    return counts
