"""Where the weights lie that training starts from."""

from pathlib import Path

from eagle3_pipeline.config import expand
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import read_champion
from eagle3_pipeline.stages.context import StageContext

WEIGHTS = "model.safetensors"


def warm_start_folder(context: StageContext) -> Path | None:
    """Folder of the weights to start from; `None`: there are none.

    Raises:
        TrainingError: `training.warm_start` names a folder that holds no checkpoint.
        StoreError: the champion's files are gone.
    """
    wanted = context.spec.training.warm_start
    if wanted == "none":
        return None
    if wanted == "champion":
        champion = read_champion(context.references.folder)
        if champion is None:
            return None
        return context.store.require(ids.DRAFT_CHECKPOINT, champion.draft.checkpoint).folder
    folder = Path(expand(wanted)).expanduser()
    if not (folder / WEIGHTS).is_file():
        raise TrainingError(f"training.warm_start: {folder} has no {WEIGHTS}; none, champion, or a checkpoint folder")
    return folder
