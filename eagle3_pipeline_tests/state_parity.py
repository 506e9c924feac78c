"""Captured states against Transformers in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from safetensors import safe_open

from eagle3_pipeline.stages.verifier_outputs import SEQUENCES
from eagle3_pipeline.store.objects import Artifact
from eagle3_pipeline.store.shards import bf16_to_float32, map_states, read_index, shard_name

TOLERANCE = 0.02
NEIGHBOUR = 0.20


def captured_states(states: Artifact) -> dict[str, np.ndarray]:
    """[n, A+1, H] float32 by sequence id."""
    found = {}
    for row in read_index(states.folder).to_pylist():
        values, _ = map_states(states.folder / shard_name(row["shard"]))
        found[row["sequence_id"]] = bf16_to_float32(values[row["row_start"] : row["row_start"] + row["num_tokens"]])
    return found


def load_reference(model_folder: Path) -> Any:
    """The model in float32 by Transformers, a multimodal one with its vision tower."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    multimodal = "text_config" in json.loads((model_folder / "config.json").read_text())
    loader = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return loader.from_pretrained(model_folder, dtype=torch.float32)


def reference_states(model: Any, input_ids: list[int]) -> dict[int, np.ndarray]:
    """[n, H] by layer id: the input of each layer, and the last layer's output before the final norm."""
    import torch

    # Transformers' last entry is behind the final norm; the hook sees what goes into it.
    before_norm: list[torch.Tensor] = []
    text = getattr(model.model, "language_model", model.model)
    hook = text.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    with torch.no_grad():
        hidden = model(torch.tensor([input_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    states = {i: layer[0].numpy() for i, layer in enumerate(hidden[:-1])}
    return states | {len(hidden) - 1: before_norm[0][0].numpy()}


def assert_states_match_transformers(
    model_folder: Path,
    sequences: Artifact,
    states: Artifact,
    tolerance: float = TOLERANCE,
    rerouted: float = 0.0,
    every: int = 1,
    expected_ids: tuple[int, ...] = (2, 4, 5, 8),
) -> dict[int, float]:
    """Every layer within `tolerance`, its neighbours more than 20 % off; returns the largest error of each layer.

    Args:
        model_folder: the verifier.
        sequences: `synthetic_generations` of a chunk.
        states: `hidden_states` of the chunk.
        tolerance: largest relative error of a sequence.
        rerouted: share of rows that may be off: a router near a tie takes another expert for a rounding error.
        every: compare each n-th sequence.
        expected_ids: the layers that must be there.
    """
    model = load_reference(model_folder)
    found = captured_states(states)
    with safe_open(states.folder / shard_name(0), "np") as file:
        layer_ids = json.loads(file.metadata()["layer_ids"])
    assert tuple(layer_ids) == expected_ids
    worst, num_rows, num_off = dict.fromkeys(layer_ids, 0.0), 0, dict.fromkeys(layer_ids, 0)
    for row in pq.read_table(sequences.path(SEQUENCES)).to_pylist()[::every]:
        expected = reference_states(model, row["input_ids"][:-1])
        num_rows += len(row["input_ids"]) - 1
        for position, layer in enumerate(layer_ids):
            got, wanted = found[row["sequence_id"]][:, position], expected[layer]
            assert got.shape == wanted.shape
            for neighbour in {layer - 1, layer + 1} & set(expected):
                assert relative_error(got, expected[neighbour]) > NEIGHBOUR
            if rerouted:
                close = np.linalg.norm(got - wanted, axis=1) < tolerance * np.linalg.norm(wanted, axis=1)
                num_off[layer] += int((~close).sum())
                got, wanted = got[close], wanted[close]
            error = relative_error(got, wanted)
            assert error < tolerance, f"layer {layer}: {error:.4f}"
            worst[layer] = max(worst[layer], error)
    assert max(num_off.values()) <= rerouted * num_rows, f"of {num_rows} rows these are off: {num_off}"
    return worst


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Norm of the difference over the norm of the expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
