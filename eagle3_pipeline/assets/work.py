"""Which runs a plan asks for next: the verifier, then chunks, then the unpartitioned stages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eagle3_pipeline.planning import Plan, PlanRow, Status
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.verifier_outputs import one_pass


@dataclass(frozen=True)
class Work:
    """One run that is wanted.

    Attributes:
        stages: stages of the run, in order.
        chunk: its partition; empty for unpartitioned stages.
        work_id: the plan's identity of this work.
    """

    stages: tuple[str, ...]
    chunk: str
    work_id: str

    @property
    def text(self) -> str:
        """One phrase for logs."""
        return f"{', '.join(self.stages)} of chunk {self.chunk}" if self.chunk else ", ".join(self.stages)


def passes(context: StageContext) -> list[tuple[str, ...]]:
    """Stages of the chunks, pass by pass: engines of two kinds must not take turns at every chunk."""
    if one_pass(context):
        return [ids.CHUNK_STAGES]
    return [(ids.DATASET, ids.SYNTHETIC_GENERATIONS), (ids.HIDDEN_STATES,)]


def next_work(plan: Plan, chunk_passes: Sequence[tuple[str, ...]]) -> list[Work]:
    """The runs that can start now; once they are done, ask again. Empty: nothing is left, or the rest is blocked."""
    # First, because Dagster shows as unsynced what was materialised before its upstream.
    if verifier := _unpartitioned(plan, (ids.VERIFIER,)):
        return verifier
    for stages in chunk_passes:
        if work := list(_chunk_work(plan, stages)):
            return work
    # While the engine of the chunks is still there: the training retires it.
    if baseline := _unpartitioned(plan, (ids.BASELINE,)):
        return baseline
    missing = any(row.chunk and row.status is not Status.FRESH for row in plan.rows)
    return [] if missing and not plan.left_out else _unpartitioned(plan, ids.TAIL_STAGES)


def _unpartitioned(plan: Plan, stages: tuple[str, ...]) -> list[Work]:
    rows = [row for row in plan.rows if row.stage in stages and row.to_run]
    if not _can_start(rows) or _blocked(rows):
        return []
    return [Work(tuple(row.stage for row in rows), "", plan.work_ids[""])]


def _chunk_work(plan: Plan, stages: tuple[str, ...]) -> Iterator[Work]:
    by_chunk: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        if row.chunk:
            by_chunk.setdefault(row.chunk, []).append(row)
    for chunk, rows in by_chunk.items():
        wanted = [row for row in rows if row.stage in stages and row.to_run]
        if _can_start(wanted) and not _blocked(rows):
            yield Work(tuple(row.stage for row in wanted), chunk, plan.work_ids[chunk])


def _can_start(rows: list[PlanRow]) -> bool:
    """Whether one of them waits for nothing; the others follow in the same run."""
    return any(row.status is not Status.PENDING for row in rows)


def _blocked(rows: list[PlanRow]) -> bool:
    return any(row.status is Status.FAILED for row in rows)
