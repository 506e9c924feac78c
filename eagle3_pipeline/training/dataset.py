"""Training data: sequences joined with their hidden states, read memory-mapped and packed into batches.

Alignment. A sequence has n tokens x[0..n-1] and a mask m that says which tokens are trained on. Its shard holds n-1
rows: row j is the verifier after x[j], aux states g[j] and last state y[j], from which the verifier picks x[j+1].
The draft at position k reads token x[k] and aux state g[k-1] and is trained towards y[k], so it predicts x[k+1].
`shift_batch` of speculators builds (x[k], g[k-1], y[k], l[k]) from arrays of one length; it is given

    x[0..n-2]    g[0..n-2]    y[0..n-2]    l[j] = m[j+1] for j in 0..n-2

x[n-1] is nobody's input: it is the target of the last row. The mask moves by one because m marks tokens and l marks the
positions that predict them: the first token of an answer and its end token are both trained on, and what a template
puts after an answer is not. After the shift a sequence has n-2 positions, and the masked tokens 2..n-1 are targets
(tokens 0 and 1 cannot be: no position before them has both an input token and a state).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from speculators.models.eagle3.data import shift_batch
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from torch.utils.data import DataLoader, Dataset

from eagle3_pipeline.errors import TrainingError, with_causes
from eagle3_pipeline.store.fingerprint import token_lists_id
from eagle3_pipeline.store.shards import read_index, shard_name
from eagle3_pipeline.training.job import ChunkInput
from eagle3_pipeline.training.split import conversation_groups

Batch = dict[str, torch.Tensor]
MIN_SEQUENCE_TOKENS = 3
_COLUMNS = ["sequence_id", "conversation_id", "input_ids", "loss_mask"]
_ROOT_COLUMNS = ["root", "turn", "num_prompt_tokens"]


@dataclass(frozen=True)
class SequenceTable:
    """Where each training sequence's rows lie, and what is trained on.

    Attributes:
        shards: paths of all shard files.
        shard: int32 [N], index into `shards`.
        row_start: int64 [N], first row in the shard.
        num_rows: int64 [N], rows of the sequence: its tokens but the last.
        masks: bool [sum of num_rows], row j of a sequence true if token j+1 is trained on.
        mask_start: int64 [N], first entry of a sequence in `masks`.
        conversation_ids: N ids; those that begin with the same prompt have one, that of the first of them.
    """

    shards: list[str]
    shard: np.ndarray
    row_start: np.ndarray
    num_rows: np.ndarray
    masks: np.ndarray
    mask_start: np.ndarray
    conversation_ids: list[str]

    @property
    def num_positions(self) -> np.ndarray:
        """Positions of each sequence after the shift, int64 [N]."""
        return self.num_rows - 1

    def mask(self, index: int) -> np.ndarray:
        """The mask of one sequence, bool [num_rows]."""
        start = self.mask_start[index]
        return self.masks[start : start + self.num_rows[index]]

    def num_supervised(self, first: int = 1) -> np.ndarray:
        """Targets of each sequence from this position on, int64 [N]; none has one at position 0."""
        before = np.concatenate([[0], np.cumsum(self.masks, dtype=np.int64)])
        return before[self.mask_start + self.num_rows] - before[self.mask_start + np.minimum(first, self.num_rows)]


def load_sequences(chunks: Sequence[ChunkInput], num_layers: int, hidden_size: int) -> SequenceTable:
    """Joins sequences with the index of their hidden states and checks that both fit together.

    Args:
        chunks: the data.
        num_layers: A+1, layers that a shard's row must hold.
        hidden_size: H of the verifier.

    Raises:
        TrainingError: names the chunk and the sequence that has no rows, another number of rows, or other token ids;
            or the shard whose shape is not [T, A+1, H] bf16.
    """
    shards: list[str] = []
    columns: dict[str, list[Any]] = {name: [] for name in ("shard", "row_start", "num_rows", "masks")}
    conversation_ids: list[str] = []
    roots: dict[str, str | None] = {}
    for chunk in chunks:
        known = set(pq.read_schema(chunk.sequences).names)
        table = pq.read_table(chunk.sequences, columns=[name for name in _COLUMNS + _ROOT_COLUMNS if name in known])
        places = _join(chunk, table, len(shards), num_layers, hidden_size, shards)
        for name, values in places.items():
            columns[name].append(values)
        found, own = table["conversation_id"].to_pylist(), conversation_roots(table)
        conversation_ids += found
        roots |= {name: own.get(name) for name in found if roots.get(name) is None}
    if not conversation_ids:
        raise TrainingError(f"the {len(chunks)} chunks hold no sequence")
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    mask_start = np.cumsum(joined["num_rows"]) - joined["num_rows"]
    groups = conversation_groups(roots)
    return SequenceTable(
        shards=shards, mask_start=mask_start, conversation_ids=[groups[name] for name in conversation_ids], **joined
    )


def conversation_roots(table: pa.Table) -> dict[str, str]:
    """What each conversation begins with: as the file says, else the prompt of its earliest sequence."""
    roots: dict[str, str] = {}
    if "root" in table.column_names:
        pairs = zip(table["conversation_id"].to_pylist(), table["root"].to_pylist(), strict=True)
        roots = {name: root for name, root in pairs if root}
    if roots or not {"turn", "num_prompt_tokens"} <= set(table.column_names):
        return roots
    order = np.argsort(table["turn"].to_numpy(), kind="stable")
    names, lengths = table["conversation_id"].to_pylist(), table["num_prompt_tokens"].to_pylist()
    for i in order.tolist():
        if names[i] not in roots:
            prompt = table["input_ids"][i].values.to_numpy()[: lengths[i]]
            roots[names[i]] = token_lists_id([prompt])
    return roots


def _join(
    chunk: ChunkInput, table: pa.Table, first: int, num_layers: int, hidden_size: int, shards: list[str]
) -> dict[str, np.ndarray]:
    """Places of one chunk's sequences; appends the chunk's shards to `shards`, the first at `first`."""
    index = read_index(chunk.hidden_states).to_pydict()
    row_of = {sequence_id: i for i, sequence_id in enumerate(index["sequence_id"])}
    # Numbers have holes: a capture that was begun again goes on after the shards of its first life.
    position_of = {number: i for i, number in enumerate(sorted(set(index["shard"])))}
    paths = [chunk.hidden_states / shard_name(number) for number in position_of]
    shard_ids = [_check_shard(path, num_layers, hidden_size) for path in paths]
    shards += map(str, paths)
    lengths, ids = _flatten(table["input_ids"])
    mask_lengths, masks = _flatten(table["loss_mask"])
    ends = np.cumsum(lengths)
    places = np.zeros((3, len(lengths)), dtype=np.int64)
    keep = np.ones(len(masks), dtype=bool)
    for i, sequence_id in enumerate(table["sequence_id"].to_pylist()):
        where = f"chunk {chunk.chunk}, sequence {sequence_id}"
        n, start = int(lengths[i]), int(ends[i] - lengths[i])
        if n < MIN_SEQUENCE_TOKENS or mask_lengths[i] != n:
            raise TrainingError(
                f"{where}: {n} tokens and a mask of {mask_lengths[i]}; expected one mask entry per token and at "
                f"least {MIN_SEQUENCE_TOKENS} tokens"
            )
        row = row_of.get(sequence_id)
        if row is None:
            raise TrainingError(
                f"{where} has no hidden states in {chunk.hidden_states}; materialise hidden_states[{chunk.chunk}] again"
            )
        shard, row_start, num_rows = position_of[index["shard"][row]], index["row_start"][row], index["num_tokens"][row]
        _check_ids(where, ids[start : start + n - 1], shard_ids[shard][row_start : row_start + num_rows])
        places[:, i] = first + shard, row_start, num_rows
        keep[start] = False
    return {"shard": places[0], "row_start": places[1], "num_rows": places[2], "masks": masks[keep]}


def _flatten(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    lengths = pc.list_value_length(column).to_numpy()
    return lengths.astype(np.int64), pc.list_flatten(column).to_numpy()


def _check_shard(path: Path, num_layers: int, hidden_size: int) -> np.ndarray:
    try:
        with safe_open(path, framework="numpy") as file:
            states = file.get_slice("hidden_states")
            shape, dtype = list(states.get_shape()), states.get_dtype()
            input_ids: np.ndarray = file.get_tensor("input_ids")
    except (OSError, RuntimeError, ValueError) as error:
        raise TrainingError(f"{path} cannot be read: {with_causes(error)}") from error
    expected = [len(input_ids), num_layers, hidden_size]
    if shape != expected or dtype != "BF16":
        raise TrainingError(
            f"{path}: hidden_states is {dtype} {shape}, expected BF16 {expected} (rows, aux layers and the last layer, "
            f"the verifier's hidden size); it was captured for another verifier or other layers"
        )
    return input_ids


def _check_ids(where: str, expected: np.ndarray, found: np.ndarray) -> None:
    if len(expected) != len(found):
        raise TrainingError(
            f"{where} has {len(found)} rows of hidden states, expected {len(expected)} (its tokens but the last)"
        )
    different = np.nonzero(expected != found)[0]
    if len(different):
        j = different[0]
        raise TrainingError(
            f"{where}: the hidden states are of other tokens, first at position {j} (expected {expected[j]}, "
            f"found {found[j]}); materialise its hidden_states again"
        )


class HiddenStateDataset(Dataset):
    """Samples of the form that `shift_batch` takes; each process opens a shard once.

    States are views of the memory map: the first copy of them is that into a packed batch.
    """

    def __init__(self, table: SequenceTable, indices: Sequence[int]) -> None:
        self.table = table
        self.indices = list(indices)
        self._files: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Memory maps do not travel to data-loader processes.
        return {**self.__dict__, "_files": {}}

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def num_positions(self) -> np.ndarray:
        """Positions of each sample after the shift, int64 [N]."""
        return self.table.num_positions[self.indices]

    @property
    def num_supervised(self) -> int:
        """Target tokens of all samples."""
        return int(self.table.num_supervised()[self.indices].sum())

    def __getitem__(self, item: int) -> Batch:
        table, index = self.table, self.indices[item]
        path = table.shards[table.shard[index]]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        file, start, num_rows = self._files[path], int(table.row_start[index]), int(table.num_rows[index])
        states = file.get_slice("hidden_states")[start : start + num_rows]  # [n-1, A+1, H]
        return {
            "hidden_states": states[:, :-1],
            "verifier_last_hidden_states": states[:, -1],
            "input_ids": file.get_slice("input_ids")[start : start + num_rows].long(),
            "loss_mask": torch.from_numpy(table.mask(index).copy()),
            "lengths": torch.tensor([num_rows]),
            "position_ids": torch.arange(num_rows),
        }


@dataclass(frozen=True)
class PackedCollate:
    """Packs samples into one row [1, S]; `document_ids` tells them apart, -1 is padding.

    Attributes:
        pad_to: S; None: as long as the samples are (only compiled kernels need one fixed shape).
        pin: whether batches lie in page-locked memory, from where a GPU copies them while it works.
    """

    pad_to: int | None
    pin: bool = False

    def __call__(self, samples: list[Batch]) -> Batch:
        """Shifts and packs samples."""
        shifted = [shift_batch(sample) for sample in samples]
        lengths = [int(sample.pop("lengths")) for sample in shifted]
        length = self.pad_to or sum(lengths)
        packed = {name: self._pack([sample[name] for sample in shifted], length, 0) for name in shifted[0]}
        documents = [torch.full((n,), number) for number, n in enumerate(lengths)]
        return {**packed, "document_ids": self._pack(documents, length, -1)}

    def _pack(self, parts: list[torch.Tensor], length: int, padding: int) -> torch.Tensor:
        """The parts one after the other in a row [1, S] or [1, S, features]; every byte is written once."""
        packed = torch.empty((length, *parts[0].shape[1:]), dtype=parts[0].dtype, pin_memory=self.pin)
        end = 0
        for part in parts:
            start, end = end, end + len(part)
            packed[start:end] = part
        packed[end:] = padding
        return (packed if packed.ndim == 1 else packed.flatten(1)).unsqueeze(0)


class PackedBatches:
    """A batch sampler: whole sequences packed up to a token budget, in an order given by (seed, epoch)."""

    def __init__(self, num_positions: np.ndarray, batch_tokens: int, seed: int) -> None:
        self._sampler = MultipackDistributedBatchSamplerV2(batch_tokens, num_positions, 1, 0, seed=seed)
        self._selected: list[list[int]] = []

    def of_epoch(self, epoch: int) -> list[list[int]]:
        """Sample numbers of each batch of an epoch."""
        self._sampler.set_epoch(epoch)
        return [[int(i) for i in batch] for batch in self._sampler]

    def select(self, batches: list[list[int]]) -> None:
        """Makes the next iteration give these batches, in this order."""
        self._selected = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._selected)

    def __len__(self) -> int:
        return len(self._selected)


def make_loader(
    dataset: HiddenStateDataset, batches: PackedBatches, collate: PackedCollate, num_workers: int, pin: bool
) -> DataLoader:
    """A loader over `batches`; worker processes, if any, live as long as it does."""
    workers: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "spawn"} if num_workers else {}
    return DataLoader(
        dataset, batch_sampler=batches, collate_fn=collate, num_workers=num_workers, pin_memory=pin, **workers
    )
