"""Keeps evaluation prompts out of the training data."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.store.fingerprint import digest

NGRAM_WORDS = 13
OVERLAPS = "overlaps_evaluation"
# Of fewer conversations it cannot be told what all of them share.
_FEWEST_ROWS = 8
# Words; scripts that are written without spaces count by character.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Overlap(NamedTuple):
    """Words of an evaluation prompt in a conversation.

    Attributes:
        place: position of the turn, and of the first of the words in it.
        words: the n-gram; empty: the turn is a whole prompt.
        prompt: one that has them.
    """

    place: tuple[int, int]
    words: tuple[str, ...]
    prompt: str

    @property
    def rejection(self) -> Rejection:
        """Why the conversation is not used."""
        how = f"shares {NGRAM_WORDS} words with" if self.words else "is"
        return Rejection(OVERLAPS, f"turn {self.place[0]} {how} the evaluation prompt {self.prompt[:80]!r}")


class Decontamination:
    """Finds evaluation prompts in conversations: as a whole turn, or 13 words of one in a row.

    Case, punctuation and white space do not count. A prompt of fewer words is found as a whole user turn only: "what is
    it?" occurs anywhere. Words that two prompts share are their common instruction and tell nothing.

    Args:
        prompts: the texts of each, or the list of texts that its user says.
    """

    def __init__(self, prompts: Iterable[str | Sequence[str]]) -> None:
        self._whole: dict[tuple[str, ...], str] = {}
        self._ngrams: dict[tuple[str, ...], str] = {}
        self._shared: set[tuple[str, ...]] = set()
        seen: set[tuple[tuple[str, ...], ...]] = set()
        for prompt in prompts:
            texts = [prompt] if isinstance(prompt, str) else prompt
            words = {tuple(_words(text)): text for text in texts}
            key = tuple(sorted(words))
            if key in seen:
                continue
            seen.add(key)
            self._whole |= {one: text for one, text in words.items() if one}
            own = {ngram: text for one, text in words.items() for ngram in _ngrams(one)}
            self._shared |= own.keys() & self._ngrams.keys()
            self._ngrams |= own
        for ngram in self._shared:
            del self._ngrams[ngram]

    @cached_property
    def content_id(self) -> str:
        """Identity of what is looked for."""
        looked_for = {"ngram_words": NGRAM_WORDS, "prompts": sorted(" ".join(words) for words in self._whole)}
        # Releases that looked for shared words, too, had this id without the note.
        return digest(looked_for | ({"shared_ngrams": "left out"} if self._shared else {}))

    def check(self, messages: Sequence[Mapping[str, str]]) -> Rejection | None:
        """Whether a conversation holds an evaluation prompt."""
        found = self.find(messages)
        return found[0].rejection if found else None

    def find(self, messages: Sequence[Mapping[str, str]]) -> list[Overlap]:
        """Everything of the evaluation prompts that a conversation holds, in order."""
        found: list[Overlap] = []
        for position, message in enumerate(messages):
            words = tuple(_words(message["content"]))
            if message["role"] == "user" and words in self._whole:
                found.append(Overlap((position, 0), (), self._whole[words]))
            for start, ngram in enumerate(_ngrams(words) if self._ngrams else ()):
                if ngram in self._ngrams:
                    found.append(Overlap((position, start), ngram, self._ngrams[ngram]))
        return found


def instructions(found: Iterable[Sequence[Overlap]]) -> set[tuple[tuple[int, int], tuple[str, ...]]]:
    """Words that most conversations of a chunk have at the same place: what all of them begin with, no prompt's own.

    Args:
        found: the overlaps of every conversation, empty where there is none.
    """
    rows = list(found)
    counts = Counter((one.place, one.words) for row in rows for one in row if one.words)
    most = max(_FEWEST_ROWS, len(rows) // 2 + 1)
    return {key for key, count in counts.items() if count >= most}


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _ngrams(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[i : i + NGRAM_WORDS] for i in range(len(words) - NGRAM_WORDS + 1))
