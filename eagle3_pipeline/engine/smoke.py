"""Smoke test of a fresh engine: does it answer, may it sample, and does it decode, while it captures?

Decoding while capturing is proved on some dozens of tokens: greedy answers are captured as they are decoded, several at
once, and once more by a prefill of the same tokens, alone. Both must give the same states. The engine's own
log-probabilities cannot tell: an engine whose recurrent state is wrong believes what it says.

On some machines vLLM samples garbage from an engine that captures hidden states, although greedy decoding is right. At
temperature 1 a sampled token lies among the k most likely ones with exactly the probability mass that these k hold, so
the expected number of such hits is the sum of the masses, whatever the model; garbage misses them.
"""

import asyncio
import contextlib
import math
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.engine.backend import Backend, CaptureTarget
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline.store.records import RecordReader
from eagle3_pipeline.store.shards import Geometry, ShardRecord, read_rows

_PROMPT = list(range(3, 19))
_NUM_TOKENS = 48
_TOP_K = 20
# Standard deviations below the expected hits at which sampling counts as garbage: one false alarm in 30,000 starts.
_DEVIATIONS = 4.0
# Several at once, as chunks are answered.
_DECODED_PROMPTS = (5, 12, 19)
_DECODED_TOKENS = 32
# A state that is off by more, relative to its size, was not rounded but computed otherwise. Rounding in bf16 sends some
# tokens to other experts, so some rows may be: of right engines at most 10 % were, of wrong ones more than 90 %.
_ROW_TOLERANCE = 0.3
MOST_ROWS_OFF = 0.2
_WRITTEN_WITHIN_S = 60.0


@dataclass(frozen=True)
class SmokeResult:
    """What the smoke test found.

    Attributes:
        hits: sampled tokens among the k most likely ones.
        expected_hits: how many there should be.
        may_sample: whether sampling from this engine is plausible.
    """

    hits: int
    expected_hits: float
    may_sample: bool


def judge_sampling(hits: int, masses: list[float]) -> SmokeResult:
    """Compares hits with the masses of the k most likely tokens at each position."""
    expected = sum(masses)
    deviation = math.sqrt(sum(mass * (1 - mass) for mass in masses))
    return SmokeResult(hits, expected, hits >= expected - _DEVIATIONS * deviation - 1)


def row_differences(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Relative difference |found - expected| / |expected| of each row and layer, float32 [n, A+1] of [n, A+1, H]."""
    size = np.maximum(np.linalg.norm(expected, axis=2), np.finfo(np.float32).tiny)
    return np.linalg.norm(found - expected, axis=2) / size


def share_off(differences: np.ndarray, tolerance: float) -> float:
    """Share of rows that differ by more than `tolerance` in some layer; 0 where there is no row.

    Args:
        differences: [n, A+1], as `row_differences` gives them.
        tolerance: largest relative difference of a row.
    """
    return float((differences > tolerance).any(axis=1).mean()) if len(differences) else 0.0


async def smoke_test(backend: Backend, spec: EngineSpec) -> dict[str, Any]:
    """A few greedy and sampled sequences.

    Returns:
        `SmokeResult`'s fields; of an engine that captures also `may_decode` (whether decoding while capturing gives the
        states of a prefill) and `decoding_fault` (why not).

    Raises:
        EngineError: the engine does not answer.
    """
    greedy = await backend.generate("smoke-greedy", _PROMPT, {"temperature": 0.0, "max_tokens": 4}, None)
    if not greedy.token_ids:
        raise EngineError("the smoke test got no token from the engine")
    sampling = {"temperature": 1.0, "max_tokens": _NUM_TOKENS, "logprobs": _TOP_K, "ignore_eos": True}
    sampled = await backend.generate("smoke-sampled", _PROMPT, sampling, None)
    if sampled.top_masses is None or sampled.top_hits is None:
        raise EngineError("the smoke test got no log-probabilities from the engine")
    found = asdict(judge_sampling(sampled.top_hits, sampled.top_masses))
    # Random weights say nothing about decoding.
    fault = await _decoding_fault(backend, spec) if spec.layer_ids and spec.load_format != "dummy" else ""
    return {**found, "may_decode": not fault, "decoding_fault": fault}


async def _decoding_fault(backend: Backend, spec: EngineSpec) -> str:
    """Why answers of this engine are not captured as it decodes them; empty: they may be."""
    with tempfile.TemporaryDirectory(prefix="eagle3-smoke-") as folder:
        try:
            decoded, prefilled, num_prompt = await _decode_and_prefill(backend, spec, Path(folder))
        except (OSError, EngineError) as error:
            return f"decoding while capturing could not be tried: {error}"
    differences = [row_differences(d, p) for d, p in zip(decoded, prefilled, strict=True)]
    prompts = np.concatenate([rows[:n] for rows, n in zip(differences, num_prompt, strict=True)])
    answers = np.concatenate([rows[n:] for rows, n in zip(differences, num_prompt, strict=True)])
    for what, rows in (("decoded tokens", answers), ("prompt tokens", prompts)):
        share = share_off(rows, _ROW_TOLERANCE)
        if share > MOST_ROWS_OFF:
            return (
                f"the states of {share:.0%} of {len(rows)} {what} differ by more than {_ROW_TOLERANCE:.0%} from those "
                f"of a prefill of the same tokens ({MOST_ROWS_OFF:.0%} may)"
            )
    return ""


async def _decode_and_prefill(
    backend: Backend, spec: EngineSpec, folder: Path
) -> tuple[list[np.ndarray], list[np.ndarray], list[int]]:
    """States [n, A+1, H] of each sequence as decoded and as prefilled, and how many of its tokens are the prompt's."""
    prompts = [[3 + (5 * k + n) % 16 for k in range(n)] for n in _DECODED_PROMPTS]
    prompts = [prompt for prompt in prompts if len(prompt) + 2 < spec.max_model_len] or [_PROMPT[:1]]
    tokens = min(_DECODED_TOKENS, spec.max_model_len - len(prompts[-1]) - 1)
    sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    targets = [CaptureTarget(folder / "decoded", f"smoke-{i}", include_output=True) for i in range(len(prompts))]
    names = [f"smoke-decoded-{i}" for i in range(len(prompts))]
    answers = await asyncio.gather(*map(backend.generate, names, prompts, [sampling] * len(prompts), targets))
    sequences = [[*prompt, *answer.token_ids[:-1]] for prompt, answer in zip(prompts, answers, strict=True)]
    decoded = await _written(folder / "decoded", sequences, spec.geometry)
    for i, ids in enumerate(sequences):
        target = CaptureTarget(folder / "prefilled", f"smoke-{i}", include_output=False)
        await backend.generate(f"smoke-prefilled-{i}", ids, {"temperature": 0.0, "max_tokens": 1}, target)
    prefilled = await _written(folder / "prefilled", sequences, spec.geometry)
    return decoded, prefilled, [len(prompt) for prompt in prompts]


async def _written(folder: Path, sequences: list[list[int]], geometry: Geometry) -> list[np.ndarray]:
    """States of the sequences `smoke-0`, `smoke-1`, ..., once they are written.

    Raises:
        EngineError: they are not, or not all rows.
    """
    deadline = time.monotonic() + _WRITTEN_WITHIN_S
    records: dict[str, ShardRecord] = {}
    with contextlib.closing(RecordReader(folder)) as reader:
        while len(records) < len(sequences):
            records |= {record.sequence_id: record for record in reader.read()}
            if time.monotonic() > deadline:
                raise EngineError(f"{len(sequences) - len(records)} of {len(sequences)} sequences were not captured")
            await asyncio.sleep(0.02)
    found = [records[f"smoke-{i}"] for i in range(len(sequences))]
    for record, ids in zip(found, sequences, strict=True):
        if record.error or record.num_tokens != len(ids):
            raise EngineError(record.error or f"{record.num_tokens} rows were captured of {len(ids)} tokens")
    return [read_rows(folder, record, geometry) for record in found]
