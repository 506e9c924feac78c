"""The draft vocabulary."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle3_pipeline.data.vocab import build_vocab_map
from eagle3_pipeline.errors import DataError


def test_the_most_frequent_tokens_are_taken_and_offsets_lead_back(tmp_path: Path) -> None:
    # Totals: token 1: 5, 2: 7, 4: 1, 7: 3. Three most frequent: 2, 1, 7.
    vocab = build_vocab_map([(1, 2), (7, 3), (2, 7), (1, 3), (4, 1)], vocab_size=8, draft_vocab_size=3)
    assert vocab.t2d.tolist() == [False, True, True, False, False, False, False, True]
    assert vocab.d2t.tolist() == [1 - 0, 2 - 1, 7 - 2]
    assert (vocab.coverage, vocab.num_seen) == (15 / 16, 3)
    vocab.save(tmp_path / "v.safetensors")
    loaded = load_file(tmp_path / "v.safetensors")
    assert loaded["t2d"].dtype == np.bool_ and loaded["d2t"].dtype == np.int64
    assert (np.arange(3) + loaded["d2t"]).tolist() == [1, 2, 7] == np.flatnonzero(loaded["t2d"]).tolist()


def test_of_equally_frequent_tokens_the_lower_ids_are_taken() -> None:
    vocab = build_vocab_map([(6, 1), (5, 1), (3, 1), (2, 2)], 8, 3)
    assert np.flatnonzero(vocab.t2d).tolist() == [2, 3, 5]


def test_too_few_seen_tokens_are_padded_with_the_lowest_unseen_ids() -> None:
    counts = [(6, 1), (2, 9)]
    vocab = build_vocab_map(counts, 8, 5)
    assert np.flatnonzero(vocab.t2d).tolist() == [0, 1, 2, 3, 6]
    assert (vocab.num_seen, vocab.coverage) == (2, 1.0)
    again = build_vocab_map(counts[::-1], 8, 5)
    assert np.array_equal(again.d2t, vocab.d2t), "the order of counts does not matter"


def test_the_whole_vocabulary_has_no_offsets() -> None:
    vocab = build_vocab_map([(0, 1)], 4, 4)
    assert vocab.t2d.all() and vocab.d2t.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("counts", "size", "message"),
    [
        ([(0, 1)], 9, "draft_vocab_size 9 exceeds the verifier's vocabulary of 8"),
        ([], 3, "no supervised token in any chunk"),
        ([(1, 0)], 3, "no supervised token in any chunk"),
        ([(8, 1)], 3, "token id 8 is outside the verifier's vocabulary of 8"),
        ([(-1, 1)], 3, "token id -1 is outside"),
    ],
)
def test_impossible_vocabularies_are_refused(counts: list, size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        build_vocab_map(counts, 8, size)
