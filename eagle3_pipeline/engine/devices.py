"""GPUs of this machine, seen without importing torch."""

import contextlib
import functools


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
