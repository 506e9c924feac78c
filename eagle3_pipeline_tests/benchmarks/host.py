"""What the engine's host, one thread for all requests, takes of a CPU for a sequence: vLLM, a model of hardly any work.

With short sequences of a small verifier that thread is what a GPU waits for.
"""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline_tests.benchmarks.multi_gpu import weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import draw_sequences
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import Shape
from eagle3_pipeline_tests.benchmarks.one_gpu.publishing import capture_context, publish
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import ON_GPU

# States of SmolLM2's size; the fewest layers of which four are captured.
_SHAPE = Shape(576, 64, 8, 1, 1, 64, 1000)
_SEQUENCES, _TOKENS, _CHUNKS = 3_000, 204, 12
_ONE_TOKEN = {"temperature": 0.0, "max_tokens": 1}


def run() -> dict[str, Any]:
    """Microseconds of CPU of the host for a sequence: without states, with them in one job, in chunks at once."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as temporary:
        return _measure(Path(temporary))


def _measure(folder: Path) -> dict[str, Any]:
    weights.start(folder / "model", _SHAPE, head_only=False).wait()
    sizes = replace(ON_GPU, batch_tokens=8192, batch_sequences=256)
    context = capture_context(folder / "home", folder / "model", 512, 0, sizes, _quiet)
    sequences = draw_sequences(_SEQUENCES, _TOKENS, _SHAPE.vocab, 1)
    rows = [{"sequence_id": name, "input_ids": ids.tolist()} for name, ids in sequences.items()]

    def one_job(name: str, states: Path | None) -> None:
        run_prompts(
            context, context.capturing_engine_spec(), PromptBatch(name, folder / name, rows, _ONE_TOKEN, states)
        )

    works: dict[str, Callable[[], object]] = {
        "without states": lambda: one_job("plain", None),
        "with states": lambda: one_job("states", folder / "states" / "captured"),
        f"with states, {_CHUNKS} chunks, {sizes.chunks_at_once} at once": lambda: publish(
            context, "load", sequences, _CHUNKS, sizes.chunks_at_once
        ),
    }
    try:
        publish(context, "warm-up", dict(list(sequences.items())[:64]), 2, 2)
        with context.engines.acquire(context.capturing_engine_spec(), _quiet) as client:
            host = psutil.Process(client.request("info")["pid"])
        return {f"host's CPU for a sequence {what} (us)": _cpu_us(host, work) for what, work in works.items()}
    finally:
        context.engines.stop_all(_quiet)


def _cpu_us(process: psutil.Process, work: Callable[[], object]) -> float:
    before = process.cpu_times()
    work()
    after = process.cpu_times()
    return 1e6 * (after.user + after.system - before.user - before.system) / _SEQUENCES


def _quiet(_line: str) -> None: ...
