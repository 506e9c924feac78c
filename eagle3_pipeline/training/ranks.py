"""Several training processes, one GPU each, as torchrun starts them; one process is the same with nothing to exchange.

Gradients are added, not averaged: each rank weighs its loss by its share of the step's supervised tokens, so the sum is
the gradient of the whole step, however its batches were dealt out.
"""

import datetime
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

# The first rank validates while the others wait.
_TIMEOUT = datetime.timedelta(hours=4)
_BUCKET_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    Attributes:
        rank: 0 .. world - 1; rank 0 validates, reports and writes.
        world: number of processes.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, device: torch.device) -> "Ranks":
        """Joins the group that torchrun's variables describe; alone without them."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return cls()
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=_TIMEOUT)
        return cls(distributed.get_rank(), world)

    def leave(self) -> None:
        """At the end: a rank that exits with the group's threads running may abort, and torchrun then ends all."""
        if self.world > 1:
            distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process reports and writes."""
        return self.rank == 0

    def deal(self, num_batches: int) -> list[int]:
        """Which of a step's batches are this rank's: every `world`-th."""
        return list(range(self.rank, num_batches, self.world))

    def add_up(self, values: torch.Tensor) -> None:
        """Replaces values by the sums of all ranks' values."""
        if self.world > 1:
            distributed.all_reduce(values)

    def add_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replaces gradients by the sums of all ranks' gradients; a rank without a batch gives zeros."""
        if self.world == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets([p.grad for p in trained if p.grad is not None]):
            flat = _flatten_dense_tensors(bucket)
            distributed.all_reduce(flat)
            for gradient, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                gradient.copy_(total)

    def tell(self, value: Any) -> Any:
        """The first rank's value, on all ranks."""
        if self.world == 1:
            return value
        box = [value]
        distributed.broadcast_object_list(box, src=0)
        return box[0]


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Runs of tensors of at most `_BUCKET_BYTES` together, or one."""
    bucket: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket
