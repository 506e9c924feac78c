"""The `verifier` asset: resolved, checked and identified by content; its artifact is a manifest only."""

from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Produced, StageContext, StageResult


def materialise_verifier(context: StageContext) -> StageResult:
    """Resolves the verifier and records its geometry.

    Raises:
        ConfigError: files are missing, or the layer ids do not fit.
    """
    verifier = context.verifier
    geometry = verifier.geometry(context.spec.capture)
    metrics = {
        "num_layers": verifier.num_layers,
        "hidden_size": verifier.hidden_size,
        "vocab_size": verifier.vocab_size,
        "max_positions_tokens": verifier.max_positions,
        "weights_bytes": verifier.weight_bytes,
        "hidden_states_bytes_per_token": geometry.row_bytes,
    }
    facts = {**verifier.facts(), "layer_ids": list(geometry.layer_ids)}
    identity = ids.verifier_identity(context.spec, verifier)
    produced = Produced(verifier.content_id, metrics, provenance={"verifier": facts})
    return context.materialise(identity, None, lambda _writer: produced)
