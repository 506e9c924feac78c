"""What the rest will cost: tokens, bytes and minutes, from what was measured, else from the token budget."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.planning.plan import Estimate, PlanRow
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.store.manifest import Manifest

# A sequence's table row per token: an int32 id, its mask, and about six bytes of text.
SEQUENCE_BYTES_PER_TOKEN = 12


@dataclass
class _Measured:
    num_rows: int = 0
    num_tokens: float = 0.0
    num_bytes: int = 0
    seconds: float = 0.0


class Costs:
    """Sums of what was measured, by stage."""

    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._measured: dict[str, _Measured] = defaultdict(_Measured)

    def measure(self, stage: str, num_rows: int, manifest: Manifest) -> None:
        """Adds an artifact, of the present settings or of earlier ones.

        Args:
            stage: its stage.
            num_rows: source rows of its chunk; 0 for unpartitioned stages.
            manifest: its manifest.
        """
        measured, metrics = self._measured[stage], manifest.metrics
        measured.num_rows += num_rows
        measured.num_tokens += metrics.get("num_tokens", 0.0)
        measured.num_bytes += manifest.size_bytes
        # The time of waiting for an engine or for its load is no property of the chunk.
        measured.seconds += metrics.get("engine_s", manifest.wall_s)

    def estimates(self, rows: Iterable[PlanRow], chunks: list[Chunk]) -> dict[str, Estimate]:
        """Costs of the lines that are not fresh."""
        sizes = {chunk.key: chunk.num_rows for chunk in chunks}
        wanted: dict[str, int] = defaultdict(int)
        for row in rows:
            if row.stage in (ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES):
                wanted[row.stage] += sizes[row.chunk]
            elif row.stage == ids.DRAFT_CHECKPOINT:
                wanted[row.stage] = sum(sizes.values())
        return {stage: self._estimate(stage, num_rows) for stage, num_rows in wanted.items()}

    def _estimate(self, stage: str, num_rows: int) -> Estimate:
        spec, made = self._context.spec, self._measured[ids.SYNTHETIC_GENERATIONS]
        at_most = not made.num_tokens
        per_row = spec.generation.max_sequence_tokens if at_most else made.num_tokens / made.num_rows
        num_tokens = round(num_rows * per_row)
        minutes = None
        if seconds_per_token := self._seconds_per_token(stage):
            devices = spec.resources.tensor_parallel_size if stage != ids.DRAFT_CHECKPOINT else 1
            minutes = num_tokens * seconds_per_token / 60
            minutes *= devices if self._context.engines.num_gpus else 1
        if stage == ids.HIDDEN_STATES:
            num_bytes = num_tokens * self._context.verifier.geometry(spec.capture).row_bytes
        elif stage == ids.SYNTHETIC_GENERATIONS:
            num_bytes = num_tokens * SEQUENCE_BYTES_PER_TOKEN
        else:
            num_bytes = self._measured[stage].num_bytes
        return Estimate(num_tokens, num_bytes, minutes, at_most)

    def _seconds_per_token(self, stage: str) -> float | None:
        """As measured, else as the pipeline file assumes."""
        measured, assumed = self._measured[stage], self._context.spec.assumptions
        if measured.num_tokens and measured.seconds:
            return measured.seconds / measured.num_tokens
        speed, times = {
            ids.SYNTHETIC_GENERATIONS: (assumed.generation_tokens_per_s, 1),
            ids.HIDDEN_STATES: (assumed.capture_tokens_per_s, 1),
            ids.DRAFT_CHECKPOINT: (assumed.training_tokens_per_s, self._context.spec.training.epochs),
        }[stage]
        return times / speed if speed else None
