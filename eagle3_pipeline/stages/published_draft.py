"""The `published_draft` asset: the champion, a pointer that moves only to a better draft."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.manifest import utc_now

CHAMPION = "champion.json"
LINK = "published_draft"


@dataclass(frozen=True)
class Publication:
    """The champion after a decision.

    Attributes:
        champion: content of `champion.json`.
        promoted: whether this decision moved the pointer.
        link: the folder that users serve, a symbolic link to the champion's artifact.
    """

    champion: dict[str, Any]
    promoted: bool
    link: Path


def read_champion(folder: Path) -> dict[str, Any] | None:
    """The champion of a pipeline's folder, if there is one."""
    try:
        return json.loads((folder / CHAMPION).read_bytes())
    except (OSError, ValueError):
        return None


def publish_draft(context: StageContext) -> Publication:
    """Promotes the current draft if its evaluation beats the champion's by `publish.min_improvement`.

    A champion that was evaluated on other prompts or another verifier is no measure: the challenger replaces it.
    """
    folder = context.references.folder
    with atomic.exclusive(folder / "champion.lock", "champion", wait=True):
        challenger = _challenger(context)
        champion = read_champion(folder)
        promoted, reason = _decide(champion, challenger, context.spec.publish.min_improvement)
        context.log(f"{context.spec.name}: {reason}")
        record = (
            {**challenger, "promoted_at": utc_now(), "previous": _without_history(champion)} if promoted else champion
        )
        record = {**(record or {}), "considered": challenger["evaluation_content"], "reason": reason}
        # The link first: between the two writes the pointer names the older of two complete drafts.
        if promoted:
            _point(folder / LINK, context.store.object_folder(ids.DRAFT_CHECKPOINT, challenger["checkpoint"]))
        atomic.write_json(folder / CHAMPION, record)
    return Publication(record, promoted, folder / LINK)


def _challenger(context: StageContext) -> dict[str, Any]:
    checkpoint = context.upstream(ids.DRAFT_CHECKPOINT).manifest
    evaluation = context.upstream(ids.DRAFT_EVALUATION).manifest
    return {
        "checkpoint": checkpoint.fingerprint,
        "checkpoint_content": checkpoint.content_id,
        "evaluation": evaluation.fingerprint,
        "evaluation_content": evaluation.content_id,
        "baseline_content": evaluation.inputs["baseline"],
        "acceptance_length": evaluation.metrics["acceptance_length"],
    }


def _decide(champion: dict[str, Any] | None, challenger: dict[str, Any], margin: float) -> tuple[bool, str]:
    new = challenger["acceptance_length"]
    if champion is None or "checkpoint" not in champion:
        return True, f"first champion, acceptance length {new:.3f}"
    old = champion["acceptance_length"]
    if champion["checkpoint_content"] == challenger["checkpoint_content"]:
        return False, f"this draft is the champion already, acceptance length {old:.3f}"
    if champion["baseline_content"] != challenger["baseline_content"]:
        return True, f"promoted, acceptance length {new:.3f}: the old champion was evaluated on other prompts"
    if new > old + margin:
        return True, f"promoted: acceptance length {new:.3f} beats {old:.3f} by more than {margin}"
    return False, f"not promoted: acceptance length {new:.3f} against the champion's {old:.3f} (margin {margin})"


def _without_history(champion: dict[str, Any] | None) -> dict[str, Any] | None:
    return {k: v for k, v in champion.items() if k != "previous"} if champion else None


def _point(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
    atomic.fsync_path(link.parent)
