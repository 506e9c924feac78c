"""Why something is not used."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """Why a row, or a turn of it, is not used: a short name to count by, and what was found."""

    reason: str
    detail: str
