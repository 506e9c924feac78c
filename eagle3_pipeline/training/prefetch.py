"""Reads batches ahead of their use."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
_DEPTH = 2


def read_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """The items in their order; the next two are made by a thread while the last one is worked on.

    Copying out of memory maps releases the interpreter, so a thread is enough, and cheaper than data-loader processes,
    which import everything anew.

    Raises:
        Exception: what making an item raises, where that item would come.
    """
    iterator = iter(items)
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        pending = deque(thread.submit(_next, iterator) for _ in range(_DEPTH))
        while found := pending.popleft().result():
            pending.append(thread.submit(_next, iterator))
            yield found[0]


def _next(iterator: Iterator[Item]) -> tuple[Item] | None:
    for item in iterator:
        return (item,)
    return None
