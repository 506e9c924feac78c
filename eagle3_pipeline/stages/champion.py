"""The champion of a pipeline: a small record beside its references, and the history of its predecessors."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import StoreError
from eagle3_pipeline.store import atomic

CHAMPION = "champion.json"
HISTORY = "champions.jsonl"
ID_DIGITS = 12


@dataclass(frozen=True)
class Contender:
    """A draft and its evaluation.

    Attributes:
        checkpoint: fingerprint of its `draft_checkpoint`.
        checkpoint_content: content id of that.
        evaluation: fingerprint of its `draft_evaluation`.
        evaluation_content: content id of that.
        baseline_content: content id of the answers that it was compared with.
        acceptance_length: served, all categories together.
        acceptance_by_category: served, by category.
    """

    checkpoint: str
    checkpoint_content: str
    evaluation: str
    evaluation_content: str
    baseline_content: str
    acceptance_length: float
    acceptance_by_category: dict[str, float]

    @property
    def draft_id(self) -> str:
        """What people type: the first digits of the checkpoint's fingerprint."""
        return self.checkpoint[:ID_DIGITS]


@dataclass(frozen=True)
class Champion:
    """`champion.json`.

    Attributes:
        draft: the champion.
        promoted_at: when.
        reason: why it is the champion, or why the last challenger is not.
        considered: evaluation contents that were compared last.
        pinned: only people replace it.
    """

    draft: Contender
    promoted_at: str
    reason: str
    considered: str
    pinned: bool = False


def read_champion(folder: Path) -> Champion | None:
    """The champion of a pipeline's folder; `None` if there is none yet.

    Raises:
        StoreError: its record is damaged: who serves it must not find another one by accident.
    """
    path = folder / CHAMPION
    try:
        return _champion(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}; restore it, or remove it: the next draft is then promoted"
        ) from error


def read_history(folder: Path) -> list[Champion]:
    """Every promotion, oldest first.

    Raises:
        StoreError: it is damaged: past champions must not be forgotten by accident.
    """
    path = folder / HISTORY
    try:
        return [_champion(json.loads(line)) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{path} cannot be read: {error}; restore it, or remove it: past champions are then forgotten, and their "
            "drafts kept only as long as their folders in published/ are there"
        ) from error


def write_champion(folder: Path, champion: Champion, promoted: bool) -> None:
    """Replaces the record atomically; a promotion goes into the history first."""
    if promoted:
        lines = [json.dumps(asdict(one), sort_keys=True) + "\n" for one in (*read_history(folder), champion)]
        atomic.write_bytes(folder / HISTORY, "".join(lines).encode())
    atomic.write_json(folder / CHAMPION, asdict(champion))


def _champion(record: dict[str, Any]) -> Champion:
    return Champion(**{**record, "draft": Contender(**record["draft"])})
