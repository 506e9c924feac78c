"""The draft vocabulary: the verifier tokens that the draft can propose."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from eagle3_pipeline.errors import DataError


@dataclass(frozen=True)
class VocabMap:
    """Maps between the vocabularies.

    Attributes:
        t2d: bool [V], true where the verifier's token is in the draft vocabulary.
        d2t: int64 [D] offsets: the verifier's id of draft token i is i + d2t[i].
        coverage: share of supervised tokens that the draft vocabulary holds.
        num_seen: tokens of the draft vocabulary that were seen; the rest is padding.
    """

    t2d: np.ndarray
    d2t: np.ndarray
    coverage: float
    num_seen: int

    def save(self, path: Path) -> None:
        """Writes `t2d` and `d2t`."""
        save_file({"t2d": self.t2d, "d2t": self.d2t}, path)


def build_vocab_map(counts: Iterable[tuple[int, int]], vocab_size: int, draft_vocab_size: int) -> VocabMap:
    """Takes the most frequent tokens; ties and padding go to the lower ids, so the result is deterministic.

    Args:
        counts: (token id, how often it is supervised); an id may occur more than once.
        vocab_size: V, rows of the verifier's output layer.
        draft_vocab_size: D.

    Raises:
        DataError: no supervised token, an id outside the vocabulary, or D > V.
    """
    if draft_vocab_size > vocab_size:
        raise DataError(f"vocab.draft_vocab_size {draft_vocab_size} exceeds the verifier's vocabulary of {vocab_size}")
    totals = np.zeros(vocab_size, dtype=np.int64)
    for token, count in counts:
        if not 0 <= token < vocab_size:
            raise DataError(f"token id {token} is outside the verifier's vocabulary of {vocab_size}")
        totals[token] += count
    if not totals.sum():
        raise DataError("no supervised token in any chunk: every loss mask is empty; look at rejected.parquet")
    # A stable sort of the negated counts keeps lower ids first among equals, unseen ones included.
    chosen = np.sort(np.argsort(-totals, kind="stable")[:draft_vocab_size])
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[chosen] = True
    d2t = chosen.astype(np.int64) - np.arange(draft_vocab_size, dtype=np.int64)
    return VocabMap(t2d, d2t, float(totals[chosen].sum() / totals.sum()), int((totals[chosen] > 0).sum()))
