"""Random training data: shards, sequences and a vocabulary map of any shape, in seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from eagle3_pipeline.config import DraftSpec, TrainingSpec
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.shards import Geometry, seal_shards
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import DraftSize

Written = Callable[[np.ndarray, np.ndarray, torch.Tensor], object]
# Sequences of a packed batch; all have the same length, so that every batch is full.
_A_BATCH = 4
NUM_VALIDATION = 8
_SHARD_BYTES = 2**32


def full_batches(size: DraftSize, num_batches: int) -> list[int]:
    """Lengths of sequences that fill `num_batches` batches, and of some for validation."""
    # One position fewer than rows after the shift, so a batch is not quite full.
    return [size.batch_tokens // _A_BATCH + 1] * (num_batches * _A_BATCH + NUM_VALIDATION)


def write_data(
    folder: Path, size: DraftSize, lengths: Sequence[int], also: Written = lambda *_: None
) -> dict[str, Any]:
    """Writes random training data.

    Args:
        folder: receives it.
        size: whose geometry it has.
        lengths: tokens of each sequence.
        also: is given each sequence: its ids [n], mask [n] and the states of all its tokens [n, layers, H].

    Returns:
        The fields of a training worker's spec that name the data.
    """
    folder.mkdir(parents=True)
    shape = size.verifier
    geometry = Geometry((*size.aux_layer_ids, shape.layers), shape.hidden)
    longest = max(lengths)
    draw = np.random.default_rng(0)
    # Drawn once: rows of different sequences start at different places of it.
    torch.manual_seed(0)
    block = torch.randn(2 * longest, len(geometry.layer_ids), shape.hidden).to(torch.bfloat16)
    appender = ShardAppender(folder / "states", geometry, _SHARD_BYTES)
    rows, records, tokens = [], [], {}
    for number, length in enumerate(lengths):
        name = f"s{number:06d}"
        ids = draw.integers(0, shape.vocab, length).astype(np.int32)
        # Batches with different numbers of supervised tokens: ranks must weigh them.
        mask = np.arange(length) >= draw.integers(length // 8, length * 7 // 8)
        start = int(draw.integers(0, longest))
        states = block[start : start + length]
        also(ids, mask, states)
        rows.append({"sequence_id": name, "conversation_id": name, "input_ids": ids, "loss_mask": mask})
        records.append(appender.append(name, memoryview(states[:-1].view(torch.int16).numpy())))
        tokens[name] = ids[:-1]
    appender.close()
    seal_shards(folder / "states", records, tokens, geometry, {})
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    pq.write_table(pa.table(columns), folder / "sequences.parquet")
    t2d = torch.zeros(shape.vocab, dtype=torch.bool)
    t2d[torch.arange(size.draft_vocab) * (shape.vocab // size.draft_vocab)] = True
    d2t = torch.nonzero(t2d).flatten() - torch.arange(size.draft_vocab)
    save_file({"t2d": t2d, "d2t": d2t}, folder / "vocab_map.safetensors")
    sequences, states_folder = str(folder / "sequences.parquet"), str(folder / "states")
    return {
        "vocab_map": str(folder / "vocab_map.safetensors"),
        "chunks": [{"chunk": "0", "sequences": sequences, "hidden_states": states_folder}],
    }


def job(
    verifier: Path, size: DraftSize, data: dict[str, Any], output: Path, world: int, **training: Any
) -> dict[str, Any]:
    """A training worker's spec: one epoch, steps of `world * batches_a_rank` batches, for any number of ranks."""
    output.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "epochs": 1,
        "lr": 1e-4,
        "batch_tokens": size.batch_tokens,
        "accumulate": world * size.batches_a_rank,
        "validation_fraction": 0.0,
        "min_validation_samples": NUM_VALIDATION,
        # Compiled attention takes longer to compile than all of this takes.
        "attention": "sdpa",
        "log_every_s": 0.01,
    }
    return {
        "job": "train",
        "verifier": {"path": str(verifier), "trust_remote_code": False},
        "aux_layer_ids": list(size.aux_layer_ids),
        "draft": DraftSpec().model_dump(mode="json"),
        "training": TrainingSpec(**settings | training).model_dump(mode="json"),
        "output": str(output),
        "init_from": None,
        "fingerprint": "f" * 64,
        "resume_every_s": 1e9,
        **data,
    }
