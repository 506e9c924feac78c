"""Generations of a chunk without an engine: one short sequence per conversation, in the real stage's format."""

import pyarrow.parquet as pq

from eagle3_pipeline.data.sequences import Sequence
from eagle3_pipeline.stages import dataset
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Produced, StageContext, StageResult
from eagle3_pipeline.stages.verifier_outputs import _write_sequences
from eagle3_pipeline.store.objects import ArtifactWriter


def write_generations(context: StageContext, chunk: str) -> StageResult:
    """Publishes them and points the pipeline at them."""
    upstream = context.upstream(ids.DATASET, chunk)
    rows = pq.read_table(upstream.path(dataset.CONVERSATIONS)).to_pylist()

    def produce(writer: ArtifactWriter) -> Produced:
        return _write_sequences(context, chunk, identity, writer, [_sequence(row) for row in rows], [], {})

    identity = ids.generations_identity(context.spec, context.verifier, upstream.manifest.content_id)
    return context.materialise(identity, chunk, produce)


def _sequence(row: dict) -> Sequence:
    """The answer's token depends on the prompt, so that another prompt gives other token counts."""
    text = row["messages"][0]["content"]
    answer = 5 + sum(text.encode()) % 90
    name = row["conversation_id"]
    return Sequence(name, name, 0, [1, 2, answer], [False, False, True], 2, "a", "", "stop")
