"""The `vocab_map` asset: the draft vocabulary from the supervised-token counts of all chunks."""

import pyarrow.parquet as pq

from eagle3_pipeline.data.vocab import build_vocab_map
from eagle3_pipeline.errors import DataError
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Produced, StageContext, StageResult
from eagle3_pipeline.stages.current import current_generations
from eagle3_pipeline.stages.verifier_outputs import TOKEN_COUNTS
from eagle3_pipeline.store.fingerprint import digest, file_checksum
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter

VOCAB_MAP_FILE = "vocab_map.safetensors"


def materialise_vocab_map(context: StageContext) -> StageResult:
    """Builds the map.

    Raises:
        StaleInputError: too many chunks have no current sequences.
        DataError: no supervised token, or the coverage is below `vocab.min_coverage`.
    """
    chunks = current_generations(context)
    counts = {key: artifact.manifest.content_ids["token_counts"] for key, artifact in chunks.items()}
    identity = ids.vocab_identity(context.spec, context.verifier, counts)
    return context.materialise(identity, None, lambda writer: _produce(context, list(chunks.values()), writer))


def _produce(context: StageContext, chunks: list[Artifact], writer: ArtifactWriter) -> Produced:
    spec = context.spec.vocab
    pairs: list[tuple[int, int]] = []
    for artifact in chunks:
        table = pq.read_table(artifact.path(TOKEN_COUNTS))
        pairs += zip(table["token_id"].to_pylist(), table["count"].to_pylist(), strict=True)
    vocab = build_vocab_map(pairs, context.verifier.vocab_size, spec.draft_vocab_size)
    if vocab.coverage < spec.min_coverage:
        raise DataError(
            f"{context.spec.name}: a draft vocabulary of {spec.draft_vocab_size} covers {vocab.coverage:.1%} of the "
            f"supervised tokens, vocab.min_coverage asks for {spec.min_coverage:.1%}; raise vocab.draft_vocab_size"
        )
    path = writer.folder / VOCAB_MAP_FILE
    vocab.save(path)
    metrics = {
        "draft_vocab_size": spec.draft_vocab_size,
        "num_seen_tokens": vocab.num_seen,
        "num_padding_tokens": spec.draft_vocab_size - vocab.num_seen,
        "coverage": vocab.coverage,
        "num_supervised_tokens": sum(count for _, count in pairs),
    }
    return Produced(digest(file_checksum(path)), metrics)
