"""Random verifiers on disk. `python -m ...weights SPEC.json` writes one, on a GPU if there is one.

SPEC.json: folder, shape, and whether only what training reads is written (embeddings, output layer, final norm).
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import Shape

_LAYERS_A_FILE = 4
Shapes = Iterator[tuple[str, tuple[int, ...]]]


def start(folder: Path, shape: Shape, head_only: bool) -> subprocess.Popen:
    """Starts the process that writes a verifier."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spec.json"
    path.write_text(json.dumps({"folder": str(folder), "shape": asdict(shape), "head_only": head_only}))
    return subprocess.Popen([sys.executable, "-m", __name__, str(path)], stdin=subprocess.DEVNULL)


def write(folder: Path, shape: Shape, head_only: bool) -> None:
    """Writes config and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    ).save_pretrained(folder)
    layers = 0 if head_only else shape.layers
    groups = [list(_head(shape))]
    for first in range(0, layers, _LAYERS_A_FILE):
        numbers = range(first, min(first + _LAYERS_A_FILE, layers))
        groups.append([item for i in numbers for item in _layer(shape, i)])
    names: dict[str, str] = {}
    total = 0
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors = {key: _draw(key, size, shape) for key, size in group}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, name)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _head(shape: Shape) -> Shapes:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    yield "lm_head.weight", (shape.vocab, shape.hidden)
    yield "model.norm.weight", (shape.hidden,)


def _layer(shape: Shape, number: int) -> Shapes:
    prefix = f"model.layers.{number}"
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
    yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
    yield f"{prefix}.self_attn.q_proj.weight", (queries, shape.hidden)
    yield f"{prefix}.self_attn.k_proj.weight", (keys, shape.hidden)
    yield f"{prefix}.self_attn.v_proj.weight", (keys, shape.hidden)
    yield f"{prefix}.self_attn.o_proj.weight", (shape.hidden, queries)
    yield f"{prefix}.mlp.gate_proj.weight", (shape.inner, shape.hidden)
    yield f"{prefix}.mlp.up_proj.weight", (shape.inner, shape.hidden)
    yield f"{prefix}.mlp.down_proj.weight", (shape.hidden, shape.inner)


def _draw(name: str, size: tuple[int, ...], shape: Shape) -> torch.Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Projections of normed inputs have about unit variance. A layer adds a quarter of what the residual starts with:
    # enough to tell neighbouring layers apart, and not so much that 32 layers amplify rounding to what a layer does.
    scale = 1.3 / shape.hidden**0.5
    if "embed_tokens" in name:
        scale = 1.0
    elif "o_proj" in name or "down_proj" in name:
        scale /= 8
    drawn = torch.randn(size, device=device, dtype=torch.bfloat16) * scale
    return drawn.cpu()


if __name__ == "__main__":
    _spec = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(0)
    write(Path(_spec["folder"]), Shape(**_spec["shape"]), _spec["head_only"])
