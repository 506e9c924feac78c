"""How much of the data the last draft has not seen."""

from eagle3_pipeline.planning.plan import Plan, Status
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.store.manifest import Manifest

_TAIL = (ids.VOCAB_MAP, ids.BASELINE, ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION)


def new_data_fraction(context: StageContext, plan: Plan) -> float | None:
    """Share of the source's rows that lie in chunks which the last draft was not trained on as they are now.

    `None` if data is not all that makes the draft stale: there is none yet, settings changed, or a stage is missing.
    """
    manifests: dict[str, Manifest] = {}
    for stage in _TAIL:
        manifest = context.last_manifest(stage)
        if manifest is None or manifest.spec != ids.semantic_part(context.spec, stage, context.verifier):
            return None
        manifests[stage] = manifest
    trained = manifests[ids.DRAFT_CHECKPOINT].inputs["synthetic_generations"]
    planned = {row.chunk for row in plan.rows if row.stage == ids.SYNTHETIC_GENERATIONS}
    chunks = [chunk for chunk in context.registry.chunks_with_work() if chunk.key in planned]
    if set(trained) - {chunk.key for chunk in chunks}:
        return None
    stale = {row.chunk for row in plan.rows if row.status is not Status.FRESH}
    new = 0
    for chunk in chunks:
        reference = context.references.get(ids.SYNTHETIC_GENERATIONS, chunk.key)
        content = reference.content_id if reference and chunk.key not in stale else None
        new += chunk.num_rows if content is None or trained.get(chunk.key) != content else 0
    return new / sum(chunk.num_rows for chunk in chunks) if new else None
