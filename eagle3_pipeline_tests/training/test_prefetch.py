"""Items come in order, errors where their item would, and nothing is left running."""

import threading
from collections.abc import Iterator

import pytest

from eagle3_pipeline.training.prefetch import read_ahead


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 50])
def test_all_items_come_in_order(count: int) -> None:
    assert list(read_ahead(range(count))) == list(range(count))
    assert _threads() == []


def test_items_that_are_false_are_items() -> None:
    assert list(read_ahead([0, None, "", []])) == [0, None, "", []]


def test_two_items_are_made_ahead_and_no_more() -> None:
    made: list[int] = []
    enough = threading.Semaphore(0)

    def items() -> Iterator[int]:
        for i in range(10):
            made.append(i)
            enough.release()
            yield i

    found = read_ahead(items())
    assert next(found) == 0
    for _ in range(3):
        assert enough.acquire(timeout=5)
    assert not enough.acquire(timeout=0.1)
    assert made == [0, 1, 2]
    found.close()  # type: ignore[attr-defined]
    assert _threads() == []


def test_an_error_comes_where_its_item_would() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise RuntimeError("unreadable")

    found = read_ahead(items())
    assert next(found) == 1
    with pytest.raises(RuntimeError, match="unreadable"):
        next(found)
    assert _threads() == []
