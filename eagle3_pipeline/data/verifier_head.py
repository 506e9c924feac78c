"""The verifier's final norm and output layer, read from its safetensors files without torch."""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.store.shards import bf16_to_float32

_BLOCK_ROWS = 8192
_READERS: dict[str, tuple[str, Any]] = {
    "F32": ("<f4", lambda values: values),
    "F16": ("<f2", lambda values: values.astype(np.float32)),
    "BF16": ("<u2", bf16_to_float32),
}
# Models whose norm or logits are not the plain formula below.
_SPECIAL_KEYS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "final_layernorm_scale")
_SPECIAL_TYPES = ("gemma",)


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
    """RMS norm and output layer: logits = lm_head @ (x / rms(x) * weight)."""

    def __init__(self, norm: np.ndarray, eps: float, lm_head: np.ndarray, convert: Any) -> None:
        self._norm = norm
        self._eps = eps
        self._lm_head = lm_head
        self._convert = convert

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Logits float32 [R, V] of states float32 [R, H] taken before the final norm."""
        rms = np.sqrt(np.mean(np.square(states, dtype=np.float64), axis=1, keepdims=True) + self._eps)
        normed = (states / rms).astype(np.float32) * self._norm
        blocks = range(0, len(self._lm_head), _BLOCK_ROWS)
        parts = [normed @ self._convert(np.asarray(self._lm_head[i : i + _BLOCK_ROWS])).T for i in blocks]
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
    """Maps the head of a model folder; `None` for models whose head is not the plain formula or is quantised."""
    path = Path(folder)
    config = json.loads((path / "config.json").read_bytes())
    text = config.get("text_config") or config
    if any(text.get(key) for key in _SPECIAL_KEYS) or str(text.get("model_type", "")).startswith(_SPECIAL_TYPES):
        return None
    norm = _find(path, ("model.norm.weight",))
    lm_head = _find(path, ("lm_head.weight",)) or _find(path, ("embed_tokens.weight",))
    if norm is None or lm_head is None:
        return None
    (norm_values, norm_dtype), (head_values, head_dtype) = norm, lm_head
    weight = _READERS[norm_dtype][1](np.asarray(norm_values))
    return VerifierHead(weight, float(text.get("rms_norm_eps", 1e-6)), head_values, _READERS[head_dtype][1])


def _find(folder: Path, suffixes: tuple[str, ...]) -> tuple[np.ndarray, str] | None:
    """Maps the tensor whose name ends in one of `suffixes`; opens only the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = sorted({file for name, file in weight_map.items() if name.endswith(suffixes)})
    else:
        files = sorted(path.name for path in folder.glob("*.safetensors"))
    for file in files:
        with (folder / file).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name, tensor in header.items():
            if name.endswith(suffixes) and tensor.get("dtype") in _READERS:
                dtype, offset = _READERS[tensor["dtype"]][0], 8 + length + tensor["data_offsets"][0]
                shape = tuple(tensor["shape"])
                return np.memmap(folder / file, dtype=dtype, mode="r", offset=offset, shape=shape), tensor["dtype"]
    return None
