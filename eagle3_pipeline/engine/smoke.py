"""Smoke test of a fresh engine: does it answer, and may it sample while it captures?

On some machines vLLM samples garbage from an engine that captures hidden states, although greedy decoding is right. At
temperature 1 a sampled token lies among the k most likely ones with exactly the probability mass that these k hold, so
the expected number of such hits is the sum of the masses, whatever the model; garbage misses them.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from eagle3_pipeline.engine.backend import Backend
from eagle3_pipeline.errors import EngineError

_PROMPT = list(range(3, 19))
_NUM_TOKENS = 48
_TOP_K = 20
# Standard deviations below the expected hits at which sampling counts as garbage: one false alarm in 30,000 starts.
_DEVIATIONS = 4.0


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


async def smoke_test(backend: Backend) -> dict[str, Any]:
    """One greedy and one sampled sequence.

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
    return asdict(judge_sampling(sampled.top_hits, sampled.top_masses))
