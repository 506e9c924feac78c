"""What training and simulation both start from: data, verifier weights, and the draft on its device."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from speculators.models.eagle3 import Eagle3DraftModel

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.acceptance import VerifierChoice
from eagle3_pipeline.training.attention import BLOCK
from eagle3_pipeline.training.dataset import (
    Batch,
    HiddenStateDataset,
    PackedBatches,
    PackedCollate,
    SequenceTable,
    load_sequences,
    make_loader,
)
from eagle3_pipeline.training.draft_config import build_layer_config, check_aux_layers, read_verifier_config
from eagle3_pipeline.training.draft_model import (
    VerifierWeights,
    VocabMap,
    build_draft,
    load_checkpoint,
    load_verifier_weights,
    load_vocab_map,
    resolve_attention,
    resolve_device,
)
from eagle3_pipeline.training.job import Job

Emit = Callable[..., None]
_VALIDATION_SEED = 0
# Beside a GPU they only copy data. With one a core, whatever else runs on a core holds up all of them.
_COPYING_THREADS = 4


@dataclass
class Bench:
    """A job's inputs, ready to run."""

    job: Job
    model: Eagle3DraftModel
    device: torch.device
    table: SequenceTable
    weights: VerifierWeights
    vocab_map: VocabMap

    def loader(self, dataset: HiddenStateDataset, batches: PackedBatches) -> torch.utils.data.DataLoader:
        """A loader of packed batches."""
        spec = self.job.training
        on_gpu = self.device.type == "cuda"
        # Compiled attention wants one shape, of whole blocks.
        pad_to = math.ceil(spec.batch_tokens / BLOCK) * BLOCK if on_gpu else None
        # Worker processes cannot lock pages, their loader does it.
        collate = PackedCollate(pad_to, pin=on_gpu and not spec.num_workers)
        return make_loader(dataset, batches, collate, spec.num_workers, on_gpu)

    @property
    def targets_multiple(self) -> int:
        """See `only_supervised`: a GPU's allocator keeps memory by size."""
        return 256 if self.device.type == "cuda" else 1

    def fixed_loader(self, indices: list[int]) -> torch.utils.data.DataLoader:
        """A loader whose batches are the same in every epoch and for every seed."""
        dataset = HiddenStateDataset(self.table, indices)
        batches = PackedBatches(dataset.num_positions, self.job.training.batch_tokens, _VALIDATION_SEED)
        batches.select(batches.of_epoch(0))
        return self.loader(dataset, batches)

    def verifier_choice(self) -> VerifierChoice:
        """The verifier's greedy tokens; holds its full output layer on the device."""
        return VerifierChoice(self.weights, self.model.verifier_norm, self.vocab_map.draft_ids, self.device)

    def to_device(self, batch: Batch) -> Batch:
        """Moves a batch."""
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}


def prepare(job: Job, emit: Emit) -> Bench:
    """Reads and checks everything; cheap checks come before large reads.

    Raises:
        TrainingError: an input is wrong or does not fit another.
    """
    device = resolve_device(job)
    if threads := job.training.num_threads or (_COPYING_THREADS if device.type == "cuda" else 0):
        torch.set_num_threads(threads)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A debugging aid that writes every new tensor once more.
        torch.utils.deterministic.fill_uninitialized_memory = False
    verifier = read_verifier_config(job.verifier_path, job.trust_remote_code)
    check_aux_layers(job.aux_layer_ids, verifier)
    layers = build_layer_config(job.draft, verifier)
    vocab_map = load_vocab_map(job.vocab_map, verifier.vocab_size)
    table = load_sequences(job.chunks, len(job.aux_layer_ids) + 1, verifier.hidden_size)
    _check_lengths(table, job, layers.max_position_embeddings)
    weights = load_verifier_weights(job.verifier_path, verifier)
    model = build_draft(job, layers, verifier, weights, vocab_map)
    if start := job.init_from or job.checkpoint:
        rows = load_checkpoint(model, start, vocab_map, remap=job.checkpoint is None)
        emit("log", message=f"weights from {start}; {rows} of {len(vocab_map.d2t)} draft tokens were in it")
    emit(
        "log",
        message=f"{len(table.conversation_ids)} sequences, {device.type}, attention {resolve_attention(job)}, "
        f"{torch.get_num_threads()} threads",
    )
    return Bench(job, model.to(device), device, table, weights, vocab_map)


def _check_lengths(table: SequenceTable, job: Job, max_positions: int) -> None:
    longest = int(table.num_rows.max()) + 1
    if longest > job.training.batch_tokens:
        raise TrainingError(
            f"the longest sequence has {longest} tokens, training.batch_tokens is {job.training.batch_tokens}; a "
            f"sequence is never cut: raise training.batch_tokens"
        )
    if longest > max_positions:
        raise TrainingError(
            f"the longest sequence has {longest} tokens, the draft's max_position_embeddings is {max_positions}; raise "
            f"draft.max_position_embeddings"
        )


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory so far: of the GPU's allocator, or this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with open(f"/proc/{os.getpid()}/status") as file:
        fields: dict[str, Any] = dict(line.split(":", 1) for line in file)
    return int(fields["VmHWM"].split()[0]) * 1024
