"""GPUs of this machine, seen without importing torch."""

import contextlib
import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of one GPU."""

    total_bytes: int
    free_bytes: int


@functools.lru_cache(maxsize=1)
def count_gpus() -> int:
    """NVIDIA GPUs that the driver reports; 0 without driver or `nvidia-ml-py`."""
    with contextlib.suppress(Exception):  # no driver, no library, no permission: there is no usable GPU
        import pynvml

        pynvml.nvmlInit()
        try:
            return pynvml.nvmlDeviceGetCount()
        finally:
            pynvml.nvmlShutdown()
    return 0


def gpu_memory() -> list[GpuMemory]:
    """Memory of every GPU in index order; empty without GPUs."""
    if not count_gpus():
        return []
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count_gpus())]
        found = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
        return [GpuMemory(int(memory.total), int(memory.free)) for memory in found]
    finally:
        pynvml.nvmlShutdown()
