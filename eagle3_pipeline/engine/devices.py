"""GPUs of this machine, seen without importing torch."""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU."""

    total_bytes: int
    free_bytes: int


@functools.lru_cache(maxsize=1)
def visible_gpus() -> tuple[int, ...]:
    """The driver's indices of the NVIDIA GPUs that this process may use, in the order of `CUDA_VISIBLE_DEVICES`.

    Without that variable all of them; empty without driver or `nvidia-ml-py`. Read once: a lease changes the variable.
    """
    return choose_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), all_gpus())


@functools.lru_cache(maxsize=1)
def all_gpus() -> list[str]:
    """Ids of this machine's NVIDIA GPUs in the driver's order, whether this process may use them or not."""
    # No driver, no library, no permission: there is no usable GPU.
    with contextlib.suppress(Exception), _driver() as handles:
        import pynvml

        return [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    return []


def choose_visible(setting: str | None, uuids: list[str]) -> tuple[int, ...]:
    """Indices that `CUDA_VISIBLE_DEVICES` leaves of GPUs with these ids.

    As CUDA does: entries are indices or beginnings of ids, and an entry that names no GPU, or one again, ends the list.
    """
    if setting is None:
        return tuple(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [i for i, uuid in enumerate(uuids) if entry and (entry == str(i) or uuid.startswith(entry))]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen += named
    return tuple(chosen)


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use."""
    return len(visible_gpus())


def gpu_memory() -> dict[int, GpuMemory]:
    """Memory of every GPU that this process may use, by the driver's index; empty without GPUs."""
    if not visible_gpus():
        return {}
    import pynvml

    with _driver() as handles:
        found = {index: pynvml.nvmlDeviceGetMemoryInfo(handles[index]) for index in visible_gpus()}
    return {index: GpuMemory(int(memory.total), int(memory.free)) for index, memory in found.items()}


@contextlib.contextmanager
def _driver() -> Iterator[list[Any]]:
    """Handles of all GPUs, in index order."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
