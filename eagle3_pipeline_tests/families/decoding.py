"""Does an engine decode, while it captures, what a prefill of the same tokens gives? One family after the other.

    python -m eagle3_pipeline_tests.families.decoding [KIND...] [--mode vllm] [--dtype bfloat16] [--gpus 1]

Without names: all. Prints a line of JSON for each: the architecture, vLLM's version, whether capture ran with our
corrections (`undrafted`) or as vLLM does it (`vllm`), and the shares of rows that the smoke test found off.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.engine import corrections, smoke
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.vllm_backend import VllmBackend
from eagle3_pipeline.engine.vllm_registry import ask_registry
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline_tests.families import builders

# Their kernels on CPUs take nothing else.
_IN_BF16 = ("qwen3_next", "qwen3_5")


def measure(folder: Path, mode: str, dtype: str, gpus: int, eager: bool) -> dict[str, Any]:
    """Starts an engine on a family's model, in one of the two ways to capture."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    text = getattr(config, "text_config", None) or config
    n = text.num_hidden_layers
    spec = EngineSpec(
        model_path=str(folder),
        model_id="family",
        dtype=dtype,
        trust_remote_code=False,
        max_model_len=129,
        layer_ids=(2, n // 2, n - 3, n),
        hidden_size=text.hidden_size,
        max_shard_bytes=2**30,
        num_gpus=gpus,
        gpu_kvcache_gib=1.0,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        enforce_eager=eager,
    )
    architecture, version = corrections.architecture(str(folder)), corrections.installed_version()
    corrections._UNDRAFTED_IN[architecture] = (version,) if mode == "undrafted" else ()
    found: dict[str, Any] = {"architecture": architecture, "vllm": version, "mode": mode, "dtype": dtype}
    backend = VllmBackend()

    async def run() -> None:
        await backend.start(spec)
        with tempfile.TemporaryDirectory() as scratch:
            decoded, prefilled, prompts = await smoke._decode_and_prefill(backend, spec, Path(scratch))
        rows = [smoke.row_differences(d, p) for d, p in zip(decoded, prefilled, strict=True)]
        parts = {
            "prompts": np.concatenate([r[:k] for r, k in zip(rows, prompts, strict=True)]),
            "answers": np.concatenate([r[k:] for r, k in zip(rows, prompts, strict=True)]),
        }
        for what, part in parts.items():
            found[what] = {f">{t}": round(smoke.share_off(part, t), 3) for t in (0.03, 0.1, 0.3)}
        found["smoke"] = {k: v for k, v in (await smoke.smoke_test(backend, spec)).items() if k != "expected_hits"}
        backend.shutdown()

    asyncio.run(run())
    return found


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=builders.KINDS)
    parser.add_argument("--mode", choices=["undrafted", "vllm"], default="undrafted")
    parser.add_argument("--dtype", default="", help="default: float32, bfloat16 where vLLM's kernels need it")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir()) / "eagle3-families")
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        folder = arguments.models / kind
        try:
            if not (folder / "config.json").exists():
                folder.mkdir(parents=True, exist_ok=True)
                builders.make_family(kind, folder)
            answer = ask_registry(corrections.architecture(str(folder)), arguments.models / "registry")
            if not answer.gives_states:
                why = answer.error or ("no SupportsEagle3" if answer.known else "not in the registry")
                raise EngineError(f"vLLM {answer.version}: {why}")
            dtype = arguments.dtype or ("bfloat16" if kind.startswith(_IN_BF16) else "float32")
            found = measure(folder, arguments.mode, dtype, arguments.gpus, arguments.eager)
        except Exception as error:  # one family's refusal is a result, too
            found = {"architecture": corrections.architecture(str(folder)), "vllm": corrections.installed_version()}
            found |= {"mode": arguments.mode, "error": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps({"kind": kind, **found}), flush=True)


if __name__ == "__main__":
    main()
