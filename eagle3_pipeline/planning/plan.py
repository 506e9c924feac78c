"""What a plan is: one line per stage and chunk."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from tabulate import tabulate

# Runs of the same work that failed before it is left out.
MAX_ATTEMPTS = 2


class Status(StrEnum):
    """State of one stage of one chunk."""

    FRESH = "fresh"
    MISSING = "missing"
    STALE = "stale"
    PENDING = "pending"
    CORRUPT = "corrupt"
    FAILED = "failed"


@dataclass(frozen=True)
class PlanRow:
    """One line of a plan.

    Attributes:
        stage: name of the stage.
        chunk: the chunk's key; empty for unpartitioned stages.
        status: its state.
        reason: why it is not fresh.
        linked: whether this pipeline's reference names the artifact; another pipeline, or earlier settings, may have
            made one that it only has to point to.
        fingerprint: the artifact that is asked for; empty while its inputs are not known.
    """

    stage: str
    chunk: str
    status: Status
    reason: str = ""
    linked: bool = True
    fingerprint: str = ""

    @property
    def to_run(self) -> bool:
        """Whether it is not fresh, or has yet to be pointed to."""
        return self.status is not Status.FRESH or not self.linked


@dataclass(frozen=True)
class Estimate:
    """What the stages that are not fresh will cost.

    Attributes:
        num_tokens: tokens of their sequences.
        num_bytes: bytes that they add to the store.
        device_minutes: minutes, times GPUs on a GPU machine, at the speed measured so far; `None`: nothing measured.
        at_most: whether tokens and bytes are an upper bound, for want of a measurement.
    """

    num_tokens: int
    num_bytes: int
    device_minutes: float | None
    at_most: bool


@dataclass(frozen=True)
class Plan:
    """All lines, in the order in which they are to be materialised.

    Attributes:
        pipeline: the pipeline's name.
        rows: the lines.
        work_ids: identity of the work that each chunk needs ("": the unpartitioned stages): by settings and inputs, not
            by what is there, so that attempts at the same work can be counted.
        estimates: costs of what is not fresh, by stage.
        left_out: chunks that the unpartitioned stages do without.
    """

    pipeline: str
    rows: list[PlanRow]
    work_ids: Mapping[str, str] = field(default_factory=dict)
    estimates: Mapping[str, Estimate] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def todo(self) -> list[PlanRow]:
        """What is not fresh."""
        return [row for row in self.rows if row.status is not Status.FRESH]

    @property
    def to_run(self) -> list[PlanRow]:
        """What is not fresh, and what is but has yet to be pointed to."""
        return [row for row in self.rows if row.to_run]

    def with_failures(self, attempts: Mapping[str, int]) -> "Plan":
        """Marks the work that failed too often.

        Args:
            attempts: failed runs by work id.
        """
        failed = {chunk for chunk, work in self.work_ids.items() if attempts.get(work, 0) >= MAX_ATTEMPTS}

        def mark(row: PlanRow) -> PlanRow:
            if row.chunk not in failed or row.status not in (Status.MISSING, Status.STALE, Status.CORRUPT):
                return row
            times = attempts[self.work_ids[row.chunk]]
            return replace(row, status=Status.FAILED, reason=f"failed {times} times, see its runs; {row.reason}")

        return replace(self, rows=[mark(row) for row in self.rows])

    def count(self) -> dict[str, Counter[str]]:
        """Statuses by stage."""
        counts: dict[str, Counter[str]] = {}
        for row in self.rows:
            counts.setdefault(row.stage, Counter())[row.status.value] += 1
        return counts

    def summary(self) -> str:
        """One line: what is not fresh, by stage."""
        open_statuses = [s for s in Status if s is not Status.FRESH]
        parts = [
            f"{stage}: " + ", ".join(f"{counts[s]} {s}" for s in open_statuses if counts[s])
            for stage, counts in self.count().items()
            if any(counts[s] for s in open_statuses)
        ]
        return "; ".join(parts) or "everything is fresh"

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "pipeline": self.pipeline,
            "rows": [asdict(row) for row in self.rows],
            "estimates": {stage: asdict(estimate) for stage, estimate in self.estimates.items()},
            "left_out": list(self.left_out),
        }

    def table(self, tablefmt: str = "simple") -> str:
        """One line per stage: how many of each status, the first reason, and what the rest will cost."""
        first = {row.stage: row.reason for row in reversed(self.todo)}
        statuses = [s for s in Status if s is not Status.FAILED or any(row.status is s for row in self.rows)]
        rows = [
            [stage, *(counts[s] or "" for s in statuses), *_costs(self.estimates.get(stage)), first.get(stage, "")]
            for stage, counts in self.count().items()
        ]
        header = ["stage", *(s.value for s in statuses), "tokens", "MiB", "device min", "why"]
        return tabulate(rows, header, tablefmt=tablefmt, disable_numparse=True)


def _costs(estimate: Estimate | None) -> list[str]:
    if estimate is None:
        return ["", "", ""]
    bound = "<= " if estimate.at_most else ""
    minutes = "?" if estimate.device_minutes is None else f"{estimate.device_minutes:,.1f}"
    return [f"{bound}{estimate.num_tokens:,}", f"{bound}{estimate.num_bytes / 2**20:,.1f}", minutes]
