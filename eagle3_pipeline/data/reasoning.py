"""Marks around reasoning: those of known families, and taking reasoning off an answer."""

from collections.abc import Iterable
from typing import NamedTuple


class Marks(NamedTuple):
    """What is written before and behind the reasoning of an answer."""

    start: str
    end: str


THINK = Marks("<think>", "</think>")
# gpt-oss: what follows the end of the analysis is the message of another channel.
HARMONY = Marks("<|channel|>analysis<|message|>", "<|channel|>final<|message|>")
KNOWN_MARKS = (
    THINK,
    HARMONY,
    Marks("[THINK]", "[/THINK]"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("<|channel>thought", "<channel|>"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
    Marks("◁think▷", "◁/think▷"),
    Marks("<longcat_think>", "</longcat_think>"),
    Marks("<|inner_prefix|>", "<|inner_suffix|>"),
    Marks("<|begin_of_thought|>", "<|end_of_thought|>"),
    Marks("<unused94>thought", "<unused95>"),
    Marks("<thinking>", "</thinking>"),
    Marks("<thought>", "</thought>"),
    Marks("<reasoning>", "</reasoning>"),
)


def named_marks(text: str) -> Marks | None:
    """The known marks that a template's text names, both of them."""
    return next((marks for marks in KNOWN_MARKS if marks.start in text and marks.end in text), None)


def split_reasoning(text: str, own: Iterable[Marks] = (THINK,), is_thinking: bool = False) -> tuple[str, str]:
    """Reasoning (with its marks, as far as they are there) and what follows it.

    Args:
        text: an answer.
        own: the verifier's marks: their end alone is enough, since a prompt may have begun the reasoning.
        is_thinking: the prompt did: an answer that was cut before the end is reasoning only.
    """
    own = tuple(own)
    for marks in own:
        before, end, after = text.partition(marks.end)
        if end:
            return before + end, after
    for marks in KNOWN_MARKS:
        before, end, after = text.partition(marks.end)
        if end and before.lstrip().startswith(marks.start):
            return before + end, after
    if is_thinking or any(text.lstrip().startswith(marks.start) for marks in own):
        return text, ""
    return "", text


def without_reasoning(text: str, own: Iterable[Marks] = ()) -> str:
    """An answer as a later turn shows it: only what follows the last of its reasoning.

    Marks of other verifiers count where the answer begins with them; `</think>`, the common one, counts anywhere.
    """
    for marks in (*own, THINK):
        if marks.end in text:
            return text.rpartition(marks.end)[2].lstrip()
    for marks in KNOWN_MARKS:
        before, end, after = text.partition(marks.end)
        if end and before.lstrip().startswith(marks.start):
            return after.lstrip()
    return text


def join_reasoning(reasoning: str, answer: str, marks: Marks, space: str = "") -> str:
    """An answer with its reasoning in marks; `space` is what the family writes beside them."""
    if marks == HARMONY:
        return f"{marks.start}{reasoning}<|end|><|start|>assistant{marks.end}{answer}"
    return f"{marks.start}{space}{reasoning}{space}{marks.end}{space * 2}{answer}"
