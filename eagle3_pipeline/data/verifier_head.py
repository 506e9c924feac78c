"""What the verifier predicts from captured states, computed by the head that its drafts are trained on."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.verifiers.ask import ask
from eagle3_pipeline.verifiers.formula import HeadFormula
from eagle3_pipeline.verifiers.tensors import head_tensors

_BLOCK_ROWS = 8192


@dataclass(frozen=True)
class TopTokens:
    """What the verifier predicts from R rows of states.

    Attributes:
        best: int64 [R], the most likely token.
        gap: float32 [R], best logit minus second best.
        spread: float32 [R], best logit minus the mean logit; the scale of `gap`.
        kth: float32 [R], the k-th highest logit.
        mass: float32 [R], probability of the k most likely tokens.
    """

    best: np.ndarray
    gap: np.ndarray
    spread: np.ndarray
    kth: np.ndarray
    mass: np.ndarray


class VerifierHead:
    """The verifier's final norm and output layer in float32.

    Args:
        formula: how logits are made.
        rows: gives rows of the output layer as float32 [n, H].
        num_rows: V.
        norm: stored gain of the norm float32 [H]; `None`: none.
        norm_bias: float32 [H].
        head_bias: float32 [V].
    """

    def __init__(
        self,
        formula: HeadFormula,
        rows: Callable[[slice], np.ndarray],
        num_rows: int,
        norm: np.ndarray | None = None,
        norm_bias: np.ndarray | None = None,
        head_bias: np.ndarray | None = None,
    ) -> None:
        self._formula, self._rows, self._num_rows = formula, rows, num_rows
        self._norm, self._norm_bias, self._head_bias = norm, norm_bias, head_bias

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Logits float32 [R, V] of states float32 [R, H] taken before the final norm."""
        import torch

        from eagle3_pipeline.verifiers.head import FinalNorm, OutputLayer, fold

        def tensor(values: np.ndarray | None) -> torch.Tensor | None:
            return None if values is None else torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))

        normed, parts = None, []
        with torch.no_grad():
            for start in range(0, self._num_rows, _BLOCK_ROWS):
                # The last block of a table that is longer than the vocabulary.
                block = slice(start, min(start + _BLOCK_ROWS, self._num_rows))
                bias = None if self._head_bias is None else self._head_bias[block]
                layer = tensor(self._rows(block))
                assert layer is not None
                weights = fold(self._formula, layer, tensor(self._norm), tensor(self._norm_bias), tensor(bias))
                if normed is None:
                    normed = FinalNorm(self._formula, weights)(torch.from_numpy(np.array(states, dtype=np.float32)))
                parts.append(OutputLayer(self._formula, layer, weights.head_bias)(normed).numpy())
        return np.concatenate(parts, axis=1)

    def top_tokens(self, states: np.ndarray, k: int) -> tuple[TopTokens, np.ndarray]:
        """Predictions from states [R, H], and the logits [R, V]."""
        logits = self.logits(states)
        highest = -np.sort(-np.partition(logits, -k, axis=1)[:, -k:], axis=1)
        log_sum = highest[:, :1] + np.log(np.exp(logits - highest[:, :1]).sum(axis=1, keepdims=True))
        top = TopTokens(
            best=logits.argmax(axis=1),
            gap=highest[:, 0] - highest[:, 1],
            spread=highest[:, 0] - logits.mean(axis=1),
            kth=highest[:, -1],
            mass=np.exp(highest - log_sum).sum(axis=1),
        )
        return top, logits


@functools.lru_cache(maxsize=2)
def load_head(folder: str) -> VerifierHead | None:
    """Maps the head of a model folder; `None` where preflight refuses it: it is quantised, or of no known formula."""
    path = Path(folder)
    asked = ask(path)
    if asked.formula is None:
        return None
    try:
        found = head_tensors(path, asked)
    except ConfigError:
        return None
    size = int(asked.config["vocab_size"])
    norm, norm_bias, head_bias = (
        None if one is None else one.floats() for one in (found.norm, found.norm_bias, found.head_bias)
    )
    return VerifierHead(asked.formula, found.head.floats, size, norm, norm_bias, _first(head_bias, size))


def _first(values: np.ndarray | None, size: int) -> np.ndarray | None:
    return None if values is None else values[:size]
