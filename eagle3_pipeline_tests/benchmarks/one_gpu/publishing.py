"""Publishes stored sequences' states as a backfill does; what that takes is measured on GPUs, and without one."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.sequences import Sequence
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Log, Produced, StageContext
from eagle3_pipeline.stages.verifier_outputs import _write_sequences, materialise_outputs
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.objects import ArtifactWriter
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import Tokens
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import Sizes
from eagle3_pipeline_tests.tiny_model import make_tokenizer


def capture_context(
    home: Path, model: Path, longest: int, num_gpus: int, sizes: Sizes, log: Log, kvcache_gib: float = 1.0
) -> StageContext:
    """A pipeline of a verifier with random weights, which chooses no token clearly: checks take their time only.

    A home, and so a pool, of its own: engines that share the GPU do not wait for each other's lease.
    """
    make_tokenizer(model)
    spec = PipelineSpec.model_validate(
        {
            "name": "bench",
            "verifier": {"model": str(model), "dtype": "bfloat16"},
            "dataset": {"path": "none"},
            "generation": {"mode": "passthrough", "max_new_tokens": 8, "max_sequence_tokens": longest},
            "capture": {"min_next_token_agreement": 1e-6, "recapture_tolerance": 100.0, "min_layer_variance": 0.0},
            "training": {"batch_tokens": longest},
            "resources": {
                "gpu_memory_utilization": sizes.utilization,
                "gpu_kvcache_gib": kvcache_gib,
                "max_num_batched_tokens": sizes.batch_tokens,
                "max_num_seqs": sizes.batch_sequences,
                "idle_timeout_s": 900.0,
            },
        }
    )
    return StageContext(spec, log, home, num_gpus)


def publish(context: StageContext, name: str, sequences: Tokens, num_chunks: int, at_once: int) -> tuple[float, float]:
    """Seconds in which the stage publishes the states of all sequences, as chunks, some at a time; their tokens.

    A backfill does the same: while one chunk is flushed and checked, the engine works on the next.
    """
    items = list(sequences.items())
    chunks = {digest(f"{name}-{i}"): dict(items[i::num_chunks]) for i in range(num_chunks)}
    for chunk, part in chunks.items():
        _store(context, chunk, part)
    started = time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        made = list(pool.map(lambda chunk: materialise_outputs(context, chunk, generations=False), chunks))
    elapsed = time.monotonic() - started
    states = [outputs.hidden_states for outputs in made]
    return elapsed, sum(found.manifest.metrics["num_tokens"] for found in states if found)


def _store(context: StageContext, chunk: str, sequences: Tokens) -> None:
    identity = ids.generations_identity(context.spec, context.verifier, chunk)
    rows = [
        Sequence(key, key, 0, tokens.tolist(), [False] + [True] * (len(tokens) - 1), 1, "", "", "data")
        for key, tokens in sequences.items()
    ]

    def write(writer: ArtifactWriter) -> Produced:
        return _write_sequences(context, chunk, identity, writer, rows, [], {})

    context.materialise(identity, chunk, write)
