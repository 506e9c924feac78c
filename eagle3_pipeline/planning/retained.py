"""What `eagle3 gc` must not touch."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_pipeline.config import find_pipeline, pipeline_files
from eagle3_pipeline.errors import Eagle3Error, StoreError
from eagle3_pipeline.planning.planner import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import read_champion, read_history
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.published_draft import PUBLISHED_FOLDERS
from eagle3_pipeline.store.references import References
from eagle3_pipeline.store.retention import Key


@dataclass
class Retained:
    """Artifacts in use.

    Attributes:
        used: what references and champions name and current plans ask for.
        notes: pipelines whose plan is not known; their references and champions count nevertheless.
    """

    used: set[Key] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)


def retained(home: Path) -> Retained:
    """What all pipelines of a home use.

    Args:
        home: `EAGLE3_HOME`.

    Raises:
        StoreError: a reference cannot be read.
    """
    found = Retained()
    root = home / "store"
    names = {path.name for path in (root / "pipelines").glob("*/")}
    for name in sorted(names):
        _add_references(found, References(root, name))
    for name in sorted({*names, *pipeline_files()}):
        try:
            context = StageContext(find_pipeline(name), lambda _line: None, home)
            context.find_verifier(offline=True)
            rows = plan(context).rows
        except Eagle3Error as error:
            if name in names:
                found.notes.append(f"{name}: only its references and its champion count, it has no plan: {error}")
            continue
        found.used |= {(row.stage, row.fingerprint) for row in rows if row.fingerprint}
    return found


def _add_references(found: Retained, references: References) -> None:
    for stage, chunk in references.places():
        reference = references.get(stage, chunk)
        if reference is None:
            where = f"{stage}[{chunk}]" if chunk else stage
            raise StoreError(
                f"the reference of {references.folder.name} to {where} cannot be read, so nobody knows what it uses; "
                "materialise it again (eagle3 materialize), then run this again"
            )
        found.used.add((reference.stage, reference.fingerprint))
    # Drafts that were ever published keep their files, whether or not the history still names them.
    for path in references.folder.glob(f"{PUBLISHED_FOLDERS}/*/*"):
        if path.is_symlink():
            found.used.add((ids.DRAFT_CHECKPOINT, Path(os.path.realpath(path)).parent.name))
    champion = read_champion(references.folder)
    for one in [*read_history(references.folder), *([champion] if champion else [])]:
        found.used |= {(ids.DRAFT_CHECKPOINT, one.draft.checkpoint), (ids.DRAFT_EVALUATION, one.draft.evaluation)}
