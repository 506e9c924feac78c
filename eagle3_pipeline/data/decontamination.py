"""Keeps evaluation prompts out of the training data."""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property

from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.store.fingerprint import digest

NGRAM_WORDS = 13
# Words; scripts that are written without spaces count by character.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


class Decontamination:
    """Finds evaluation prompts in conversations: as a whole turn, or 13 words of one in a row.

    Case, punctuation and white space do not count. A prompt of fewer words is found as a whole user turn only: "what is
    it?" occurs anywhere.
    """

    def __init__(self, prompts: Iterable[str]) -> None:
        self._whole: dict[tuple[str, ...], str] = {}
        self._ngrams: dict[tuple[str, ...], str] = {}
        for prompt in prompts:
            words = tuple(_words(prompt))
            if words:
                self._whole[words] = prompt
            for ngram in _ngrams(words):
                self._ngrams[ngram] = prompt

    @cached_property
    def content_id(self) -> str:
        """Identity of what is looked for."""
        return digest({"ngram_words": NGRAM_WORDS, "prompts": sorted(" ".join(words) for words in self._whole)})

    def check(self, messages: list[dict[str, str]]) -> Rejection | None:
        """Whether a conversation holds an evaluation prompt."""
        for position, message in enumerate(messages):
            words = tuple(_words(message["content"]))
            if message["role"] == "user" and words in self._whole:
                return _overlap(position, "is", self._whole[words])
            for ngram in _ngrams(words) if self._ngrams else ():
                if ngram in self._ngrams:
                    return _overlap(position, f"shares {NGRAM_WORDS} words with", self._ngrams[ngram])
        return None


def _overlap(position: int, how: str, prompt: str) -> Rejection:
    return Rejection("overlaps_evaluation", f"turn {position} {how} the evaluation prompt {prompt[:80]!r}")


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def _ngrams(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    return (words[i : i + NGRAM_WORDS] for i in range(len(words) - NGRAM_WORDS + 1))
