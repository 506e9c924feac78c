"""Acceptance statistics of speculative decoding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Acceptance:
    """Counts of draft steps.

    Attributes:
        num_drafts: draft steps.
        accepted_per_position: of these, how many accepted the token at each draft position; a token counts only if
            all before it were accepted, so the list never rises.
    """

    num_drafts: int
    accepted_per_position: tuple[int, ...]

    @property
    def accepted_per_draft(self) -> float:
        """Mean accepted tokens per draft step, without the bonus token."""
        return sum(self.accepted_per_position) / self.num_drafts if self.num_drafts else 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verifier step: 1 (the bonus token) + accepted tokens per draft step."""
        return 1.0 + self.accepted_per_draft

    def rates(self) -> list[float]:
        """Share of draft steps that accept position i (unconditional)."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position]

    def conditional_rates(self) -> list[float]:
        """Share of steps that accept position i among those that accepted all before it."""
        before = [self.num_drafts, *self.accepted_per_position[:-1]]
        return [a / b if b else 0.0 for a, b in zip(self.accepted_per_position, before, strict=True)]


def from_counters(before: dict[str, Any], after: dict[str, Any], num_positions: int) -> Acceptance:
    """Acceptance between two snapshots of vLLM's counters.

    Args:
        before: num_drafts, accepted_per_position; missing keys are 0.
        after: the same, later.
        num_positions: num_speculative_tokens.
    """
    zeros = [0] * num_positions
    later = list(after.get("accepted_per_position", zeros))
    earlier = list(before.get("accepted_per_position", zeros))
    accepted = tuple(int(a - b) for a, b in zip(later, earlier, strict=True))
    return Acceptance(int(after.get("num_drafts", 0) - before.get("num_drafts", 0)), accepted)


def pool(parts: Iterable[Acceptance]) -> Acceptance:
    """All draft steps together (not a mean of means)."""
    parts = list(parts)
    width = max((len(p.accepted_per_position) for p in parts), default=0)
    totals = [sum(p.accepted_per_position[i] for p in parts) for i in range(width)]
    return Acceptance(sum(p.num_drafts for p in parts), tuple(totals))


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Position of the first differing token, or the shorter length if one is a prefix; `None` if equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))
