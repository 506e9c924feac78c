"""The `published_draft` asset: the champion, a pointer that moves only to a better draft, or where people pin it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from eagle3_pipeline.config import PublishSpec
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.evaluation.report import POOLED
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import (
    Champion,
    Contender,
    read_champion,
    read_history,
    write_champion,
)
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_evaluation import EVALUATION
from eagle3_pipeline.stages.model_card import CARD, write_published_folder
from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.manifest import read_manifest, utc_now
from eagle3_pipeline.store.objects import Artifact

LINK = "published_draft"
PUBLISHED_FOLDERS = "published"


@dataclass(frozen=True)
class Publication:
    """The champion after a decision.

    Attributes:
        champion: content of `champion.json`.
        promoted: whether this decision moved the pointer.
        link: the folder that users serve: a symbolic link to the champion's folder.
    """

    champion: Champion
    promoted: bool
    link: Path


def publish_draft(context: StageContext) -> Publication:
    """Promotes the current draft if it beats the champion by `publish.min_improvement` and falls behind nowhere."""
    with _champions(context) as folder:
        challenger = contender(context.upstream(ids.DRAFT_CHECKPOINT), context.upstream(ids.DRAFT_EVALUATION))
        champion = read_champion(folder)
        promoted, reason = decide(champion, challenger, context.spec.publish)
        context.log(f"{context.spec.name}: {reason}")
        if promoted or champion is None:
            return _crown(context, Champion(challenger, utc_now(), reason, challenger.evaluation_content))
        champion = replace(champion, reason=reason, considered=challenger.evaluation_content)
        write_champion(folder, champion, promoted=False)
        if damage := published_damage(context, champion):
            context.log(f"{context.spec.name}: {damage}; writing it again")
            _write_folder(context, champion, None)
        return Publication(champion, False, folder / LINK)


def published_damage(context: StageContext, champion: Champion) -> str:
    """What is wrong with the folder that people serve; empty: nothing."""
    link = context.references.folder / LINK
    checkpoint = context.store.object_folder(ids.DRAFT_CHECKPOINT, champion.draft.checkpoint)
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return f"the champion's checkpoint {champion.draft.draft_id} is gone"
    if os.path.realpath(link).rsplit("/", 1)[-1] != champion.draft.draft_id or not (link / CARD).is_file():
        return f"{link} is not the champion's folder"
    wrong = [name for name in manifest.files if os.path.realpath(link / name) != os.path.realpath(checkpoint / name)]
    return f"{link / wrong[0]} is not the champion's file" if wrong else ""


def pin_draft(context: StageContext, draft_id: str) -> Publication:
    """Makes a past champion, or the current draft, the champion until `unpin_draft`.

    Raises:
        ConfigError: no such draft of this pipeline has an evaluation.
        StoreError: its files are gone.
    """
    with _champions(context) as folder:
        known = {one.draft_id: one for one in _known_drafts(context)}
        matches = [one for name, one in known.items() if draft_id and name.startswith(draft_id[: len(name)])]
        if len(matches) != 1:
            there_are = ", ".join(known) or "none"
            raise ConfigError(f"{context.spec.name}: {len(matches)} drafts match {draft_id!r}; there are: {there_are}")
        chosen = matches[0]
        champion = read_champion(folder)
        considered = champion.considered if champion else chosen.evaluation_content
        return _crown(context, Champion(chosen, utc_now(), "pinned by hand", considered, pinned=True))


def unpin_draft(context: StageContext) -> Champion:
    """Lets the next decision replace the champion again.

    Raises:
        ConfigError: there is no champion.
    """
    with _champions(context) as folder:
        champion = read_champion(folder)
        if champion is None:
            raise ConfigError(f"{context.spec.name} has no champion yet")
        # What was turned down while it was pinned is compared again.
        champion = replace(champion, pinned=False, considered="", reason="not pinned any more")
        write_champion(folder, champion, promoted=False)
        return champion


def contender(checkpoint: Artifact, evaluation: Artifact) -> Contender:
    """A draft by its artifacts."""
    rows = pq.read_table(evaluation.path(EVALUATION)).to_pylist()
    return Contender(
        checkpoint=checkpoint.manifest.fingerprint,
        checkpoint_content=checkpoint.manifest.content_id,
        evaluation=evaluation.manifest.fingerprint,
        evaluation_content=evaluation.manifest.content_id,
        baseline_content=evaluation.manifest.inputs["baseline"],
        acceptance_length=evaluation.manifest.metrics["acceptance_length"],
        acceptance_by_category={row["category"]: row["acceptance_length"] for row in rows if row["category"] != POOLED},
    )


def decide(champion: Champion | None, challenger: Contender, spec: PublishSpec) -> tuple[bool, str]:
    """Whether the challenger becomes the champion, and why.

    A champion that was evaluated on other prompts or another verifier is no measure: the challenger replaces it.
    """
    new = challenger.acceptance_length
    if champion is None:
        return True, f"first champion, acceptance length {new:.3f}"
    old = champion.draft
    if old.checkpoint_content == challenger.checkpoint_content:
        return False, f"this draft is the champion already, acceptance length {old.acceptance_length:.3f}"
    if champion.pinned:
        return False, f"not promoted: the champion {old.draft_id} is pinned (eagle3 promote PIPELINE --unpin)"
    if old.baseline_content != challenger.baseline_content:
        return True, f"promoted, acceptance length {new:.3f}: the old champion was evaluated on other prompts"
    against = f"acceptance length {new:.3f} against the champion's {old.acceptance_length:.3f}"
    if new <= old.acceptance_length + spec.min_improvement:
        return False, f"not promoted: {against}, publish.min_improvement is {spec.min_improvement:g}"
    if spec.max_category_drop is not None:
        for category, before in old.acceptance_by_category.items():
            after = challenger.acceptance_by_category.get(category, 0.0)
            if after < before - spec.max_category_drop:
                return False, (
                    f"not promoted: {against}, but {after:.3f} against {before:.3f} in category {category}; "
                    f"publish.max_category_drop is {spec.max_category_drop:g}"
                )
    return True, f"promoted: {against}"


def _known_drafts(context: StageContext) -> Iterator[Contender]:
    """Past champions, then the current draft if it was evaluated."""
    for one in read_history(context.references.folder):
        yield one.draft
    references = [context.references.get(stage, None) for stage in (ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION)]
    found = [context.store.get(one.stage, one.fingerprint) if one else None for one in references]
    if found[0] and found[1]:
        evaluated = found[1].manifest.inputs["draft_checkpoint"]
        if evaluated == found[0].manifest.content_id:
            yield contender(found[0], found[1])


def _crown(context: StageContext, champion: Champion) -> Publication:
    folder = context.references.folder
    before = read_champion(folder)
    other = before.draft if before and before.draft.checkpoint != champion.draft.checkpoint else None
    # The folder first: between the two writes the pointer names the older of two complete drafts.
    _write_folder(context, champion, other)
    write_champion(folder, champion, promoted=True)
    return Publication(champion, True, folder / LINK)


def _write_folder(context: StageContext, champion: Champion, before: Contender | None) -> None:
    folder, draft = context.references.folder, champion.draft
    checkpoint = context.store.require(ids.DRAFT_CHECKPOINT, draft.checkpoint)
    evaluation = context.store.require(ids.DRAFT_EVALUATION, draft.evaluation)
    target = folder / PUBLISHED_FOLDERS / draft.draft_id
    write_published_folder(context, target, checkpoint, evaluation, champion, before)
    _point(folder / LINK, target)


@contextmanager
def _champions(context: StageContext) -> Iterator[Path]:
    folder = context.references.folder
    with atomic.exclusive(folder / "champion.lock", f"champion of {context.spec.name}", wait=True, on_wait=context.log):
        yield folder


def _point(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    os.replace(temporary, link)
    atomic.fsync_path(link.parent)
