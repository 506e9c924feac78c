"""Work on many bytes: reading, hashing and comparing them leave the interpreter to other threads meanwhile."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_THREADS = min(8, os.cpu_count() or 1)


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Results of `work` in the order of the items; the first error is raised."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(work, items))
