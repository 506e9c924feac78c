"""What the host asks of an engine. The real one is `vllm_backend`; tests of the pipeline around it bring a fake."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from eagle3_pipeline.engine.spec import EngineSpec


@dataclass(frozen=True)
class Answer:
    """Tokens of one request, as sampled.

    Attributes:
        token_ids: sampled ids, the stop token included.
        finish_reason: stop or length.
        cumulative_logprob: sum of the sampled tokens' log-probabilities, if asked for.
        top_gaps: per token, the log-probability of the best minus the second best candidate, if asked for.
        top_masses: per token, the probability that the candidates hold together, if asked for.
        top_hits: sampled tokens that are among their position's candidates, if asked for.
        top_tokens: per token, the candidates' ids, if asked for.
        top_logprobs: per token, the candidates' log-probabilities, if asked for.
    """

    token_ids: list[int]
    finish_reason: str
    cumulative_logprob: float | None = None
    top_gaps: list[float] | None = None
    top_masses: list[float] | None = None
    top_hits: int | None = None
    top_tokens: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None


@dataclass(frozen=True)
class CaptureTarget:
    """Where the states of a request go.

    Attributes:
        folder: shard folder.
        sequence_id: names the record.
        include_output: the states of sampled tokens too (all but the last one's).
    """

    folder: Path
    sequence_id: str
    include_output: bool


class Backend(Protocol):
    """An engine in this process or its children."""

    async def start(self, spec: EngineSpec) -> None:
        """Loads the model."""

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        capture: CaptureTarget | None,
        urgent: bool = False,
    ) -> Answer:
        """Answers one prompt, an urgent one before others; cancelling the task aborts the request."""

    def failed(self) -> bool:
        """Whether the engine died and can answer nothing more."""

    async def counters(self) -> dict[str, Any]:
        """Speculative-decoding counters since the start: num_drafts, num_draft_tokens, accepted_per_position."""

    def shutdown(self) -> None:
        """Ends the engine."""
