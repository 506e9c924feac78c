"""What publishing the states of an 8B verifier costs beside a GPU that never waits: an engine of its speed, no GPU."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline_tests.benchmarks.multi_gpu import weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import draw_sequences
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import Shape
from eagle3_pipeline_tests.benchmarks.one_gpu.publishing import capture_context, publish
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import ON_GPU
from eagle3_pipeline_tests.paced_engine import PACED_BACKEND

# Of Llama-3-8B by its states; the rest is as small as it can be.
_SHAPE = Shape(4096, 256, 8, 4, 4, 64, 1000)
_TOKENS_PER_S = 43_000.0
_SEQUENCES, _TOKENS, _CHUNKS = 3_500, 204, 12


def run() -> dict[str, Any]:
    """Tokens/s from the first request to the last published manifest, of so many that the engine would give."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EAGLE3_ENGINE_BACKEND", PACED_BACKEND)
        patch.setenv("EAGLE3_PACED_TOKENS_PER_S", str(_TOKENS_PER_S))
        folder = Path(temporary)
        weights.start(folder / "model", _SHAPE, head_only=True).wait()
        context = capture_context(folder / "home", folder / "model", 2 * _TOKENS, 0, ON_GPU, _quiet)
        sequences = draw_sequences(_SEQUENCES, _TOKENS, _SHAPE.vocab, 1)
        try:
            # The first starts the engine.
            publish(context, "warm-up", dict(list(sequences.items())[:8]), 1, 1)
            seconds, num_tokens = publish(context, "load", sequences, _CHUNKS, ON_GPU.chunks_at_once)
        finally:
            context.engines.stop_all(_quiet)
    gib = num_tokens * context.verifier.geometry(context.spec.capture).row_bytes / 2**30
    what = f"{_CHUNKS} chunks, {ON_GPU.chunks_at_once} at once, {gib:.0f} GiB of states"
    return {
        f"{what}: tokens/s of the engine": _TOKENS_PER_S,
        f"{what}: tokens/s published": num_tokens / seconds,
        f"{what}: of the engine's (%)": 100 * num_tokens / seconds / _TOKENS_PER_S,
    }


def _quiet(_line: str) -> None: ...
