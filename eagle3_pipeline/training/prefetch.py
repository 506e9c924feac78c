"""Reads batches ahead of their use, and copies to and from a GPU while it works."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch

from eagle3_pipeline.training.dataset import Batch

Item = TypeVar("Item")
# Items that are ready or being made while one is worked on.
DEPTH = 2


def read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The items in their order; the next two are made by a thread while the last one is worked on.

    Copying out of memory maps releases the interpreter, so a thread is enough, and cheaper than data-loader processes,
    which import everything anew.

    Raises:
        Exception: what making an item raises, where that item would come.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        pending = deque(thread.submit(_next, iterator) for _ in range(DEPTH))
        while found := pending.popleft().result():
            pending.append(thread.submit(_next, iterator))
            yield found[0]


def _next(iterator: Iterator[Item]) -> tuple[Item] | None:
    for item in iterator:
        return (item,)
    return None


@dataclass(frozen=True)
class Moving:
    """A batch that is on its way to a device."""

    batch: Batch
    arrival: torch.cuda.Event | None

    def wait(self) -> Batch:
        """The batch; the device, not the caller, waits for it."""
        if self.arrival:
            stream = torch.cuda.current_stream(self.batch["input_ids"].device)
            stream.wait_event(self.arrival)
            for value in self.batch.values():
                value.record_stream(stream)
        return self.batch


class Mover:
    """Copies batches to a device, on a GPU beside what it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batch: Batch) -> Moving:
        """Starts to copy a batch."""
        with torch.cuda.stream(self._stream):
            moved = {name: value.to(self._device, non_blocking=True) for name, value in batch.items()}
            return Moving(moved, self._stream.record_event() if self._stream else None)


@dataclass(frozen=True)
class Fetched:
    """Values that are on their way from a device."""

    values: torch.Tensor
    arrival: torch.cuda.Event | None

    @classmethod
    def start(cls, values: torch.Tensor) -> "Fetched":
        """Starts to copy values that the device is still computing."""
        if not values.is_cuda:
            return cls(values, None)
        copied = values.to("cpu", non_blocking=True)
        return cls(copied, torch.cuda.current_stream(values.device).record_event())

    def wait(self) -> list[float]:
        """The values, once they are there."""
        if self.arrival:
            self.arrival.synchronize()
        found: list[float] = self.values.tolist()
        return found
