"""Which runs a plan asks for next: the verifier, then chunks, then the unpartitioned stages."""

from collections.abc import Iterator
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


def next_work(plan: Plan, chunk_passes: list[tuple[str, ...]]) -> list[Work]:
    """The runs that can start now; once they are done, ask again. Empty: nothing is left, or the rest is blocked."""
    # First, because Dagster shows as unsynced what was materialised before its upstream.
    verifier = [row for row in plan.rows if row.stage == ids.VERIFIER and row.to_run]
    if verifier:
        return [] if _blocked(verifier) else [Work((ids.VERIFIER,), "", plan.work_ids[""])]
    for stages in chunk_passes:
        if work := list(_chunk_work(plan, stages)):
            return work
    tail = [row for row in plan.rows if row.stage in ids.TAIL_STAGES and row.to_run]
    ready = [row for row in tail if row.status is not Status.PENDING]
    if not ready or _blocked(tail):
        return []
    return [Work(tuple(row.stage for row in _runnable(tail)), "", plan.work_ids[""])]


def _chunk_work(plan: Plan, stages: tuple[str, ...]) -> Iterator[Work]:
    by_chunk: dict[str, list[PlanRow]] = {}
    for row in plan.rows:
        if row.chunk:
            by_chunk.setdefault(row.chunk, []).append(row)
    for chunk, rows in by_chunk.items():
        wanted = tuple(row.stage for row in rows if row.stage in stages and row.to_run)
        if wanted and not _blocked(rows):
            yield Work(wanted, chunk, plan.work_ids[chunk])


def _blocked(rows: list[PlanRow]) -> bool:
    return any(row.status is Status.FAILED for row in rows)


def _runnable(tail: list[PlanRow]) -> list[PlanRow]:
    """Without what waits for chunks: those are not enough yet."""
    waiting = {row.stage for row in tail if row.status is Status.PENDING and "chunks" in row.reason}
    if ids.VOCAB_MAP in waiting or ids.DRAFT_CHECKPOINT in waiting:
        return [row for row in tail if row.stage in (ids.VOCAB_MAP, ids.BASELINE) and row.stage not in waiting]
    return tail
