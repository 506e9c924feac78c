"""The draft's settings with what follows from others."""

from pathlib import Path

from eagle3_pipeline.config import DraftSpec
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.verifiers.ask import ask


def resolved_draft(context: StageContext) -> DraftSpec:
    """`draft:`, with as many positions as the verifier's YaRN gives where the longest sequence needs them.

    Some configs name the positions before the scaling; sequences that are shorter do without more.
    """
    draft, longest = context.spec.draft, context.spec.generation.max_sequence_tokens
    own = ask(Path(context.verifier.path)).config.get("max_position_embeddings")
    if draft.max_position_embeddings is None and own and own < longest <= context.verifier.max_positions:
        return draft.model_copy(update={"max_position_embeddings": context.verifier.max_positions})
    return draft
