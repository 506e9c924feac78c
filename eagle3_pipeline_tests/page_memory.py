"""Memory as states lie in it that a GPU copied to the host."""

import mmap


def in_pages(data: bytes) -> memoryview:
    """A copy that begins at a page, as page-locked memory does."""
    # There is no mapping of no bytes.
    memory = mmap.mmap(-1, max(1, len(data)))
    memory.write(data)
    return memoryview(memory)[: len(data)]
