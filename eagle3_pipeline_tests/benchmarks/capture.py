"""Generation and capture on one engine against plain generation: what does capturing cost on this machine?"""

import tempfile
import time
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import find_pipeline, project_home
from eagle3_pipeline.data.smollm2 import prepare_model
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.templates import chat_template

NUM_PROMPTS = 64
MAX_NEW_TOKENS = 64


def run() -> dict[str, Any]:
    """tokens/s of greedy generation without and with capture, and of a prefill capture; seconds of both starts."""
    prepare_model(project_home() / "models" / "SmolLM2-135M-Instruct", print)
    with tempfile.TemporaryDirectory() as temporary:
        return _measure(Path(temporary))


def _measure(folder: Path) -> dict[str, Any]:
    context = StageContext(find_pipeline("smollm2_demo"), log=lambda _line: None, home=folder)
    template = chat_template(context)
    texts = [f"Explain in a few words what the number {i} is used for." for i in range(NUM_PROMPTS)]
    prompts = [template.render([{"role": "user", "content": text}], generation_prompt=True) for text in texts]
    rows = [{"sequence_id": f"p{i}", "input_ids": template.encode(text)} for i, text in enumerate(prompts)]
    # Every answer has the same length, so that both engines do the same work.
    sampling = {"temperature": 0.0, "max_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
    warm_up = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    found: dict[str, Any] = {}
    for name, engine in (("plain", context.engine_spec()), ("capturing", context.capturing_engine_spec())):
        started = time.monotonic()
        with context.engines.acquire(engine, context.log):
            found[f"{name} engine start (s)"] = time.monotonic() - started
        captures = name == "capturing"
        states = folder / "states" if captures else None
        run_prompts(context, engine, PromptBatch("warm-up", folder / f"{name}-warm", rows[:8], warm_up))
        batch = PromptBatch(name, folder / name, rows, sampling, states, include_output=captures)
        _, speed = run_prompts(context, engine, batch)
        found[f"{name} generation (new tokens/s)"] = speed["new_tokens_per_s"]
        if captures:
            prefill = PromptBatch(
                "prefill", folder / "prefill", rows, warm_up | {"max_tokens": 1}, folder / "prefilled"
            )
            found["prefill capture (tokens/s)"] = run_prompts(context, engine, prefill)[1]["tokens_per_s"]
    context.engines.stop_all(context.log)
    plain, capturing = (found[f"{name} generation (new tokens/s)"] for name in ("plain", "capturing"))
    found["capture overhead over plain generation (%)"] = 100 * (plain / capturing - 1)
    return found
