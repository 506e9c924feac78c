"""`published_draft`: the champion that users serve."""

import dagster as dg

from eagle3_pipeline.assets.common import asset_arguments, asset_key, stage_context
from eagle3_pipeline.assets.resources import PipelineHome
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.stages.identity import DRAFT_EVALUATION, PUBLISHED_DRAFT
from eagle3_pipeline.stages.model_card import CARD
from eagle3_pipeline.stages.published_draft import publish_draft


def build_published_draft(spec: PipelineSpec) -> dg.AssetsDefinition:
    """Unpartitioned: a pointer that moves only to a better draft."""

    @dg.asset(
        **asset_arguments(spec, PUBLISHED_DRAFT, {"vllm"}),
        deps=[asset_key(spec, DRAFT_EVALUATION)],
        description="The champion: the best draft so far by served acceptance length. Its folder is what users serve.",
    )
    def published_draft(context: dg.AssetExecutionContext, home: PipelineHome) -> dg.MaterializeResult:
        with stage_context(context, spec, home) as stage:
            publication = publish_draft(stage)
        champion = publication.champion
        return dg.MaterializeResult(
            data_version=dg.DataVersion(champion.draft.checkpoint_content),
            metadata={
                "acceptance_length": champion.draft.acceptance_length,
                "draft_id": champion.draft.draft_id,
                "promoted": publication.promoted,
                "pinned": champion.pinned,
                "decision": champion.reason,
                "folder": dg.MetadataValue.path(str(publication.link)),
                "model_card": dg.MetadataValue.md((publication.link / CARD).read_text(encoding="utf-8")),
            },
        )

    return published_draft
