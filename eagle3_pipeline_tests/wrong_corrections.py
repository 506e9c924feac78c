"""An engine that captures recurrent verifiers with a correction of vLLM that does not hold for them.

`EAGLE3_ENGINE_BACKEND=eagle3_pipeline_tests.wrong_corrections:WrongBackend`; with `EAGLE3_TEST_NO_SMOKE` set its smoke
test finds nothing wrong with how it decodes.
"""

import os
from typing import Any

from eagle3_pipeline.engine import corrections, smoke
from eagle3_pipeline.engine.vllm_backend import VllmBackend

WRONG_BACKEND = f"{__name__}:WrongBackend"


async def _no_fault(*_: Any) -> str:
    return ""


class WrongBackend(VllmBackend):
    """Runs Qwen3-Next as if nothing were drafted, although its recurrent state is laid out for a drafted token."""

    def __init__(self) -> None:
        super().__init__()
        corrections._UNDRAFTED_IN["Qwen3NextForCausalLM"] = (corrections.installed_version(),)
        if os.environ.get("EAGLE3_TEST_NO_SMOKE"):
            smoke._decoding_fault = _no_fault  # type: ignore[assignment]
