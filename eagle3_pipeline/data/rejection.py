"""Why something is not used."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """Why a row, or a turn of it, is not used: a short name to count by, and what was found."""

    reason: str
    detail: str


def describe(counts: Mapping[str, int]) -> str:
    """How many were rejected for which reason, most frequent first."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count:,}" for reason, count in ordered) or "none"
