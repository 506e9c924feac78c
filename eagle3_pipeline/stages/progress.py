"""Progress lines with an ETA, about every ten seconds."""

import time
from collections.abc import Callable
from typing import Any


class ProgressLog:
    """Turns an engine's `progress` events into log lines.

    Args:
        log: takes the lines.
        what: names the work.
        every_s: least seconds between two lines.
    """

    def __init__(self, log: Callable[[str], None], what: str, every_s: float = 10.0) -> None:
        self._log = log
        self._what = what
        self._every_s = every_s
        self._last = time.monotonic()

    def __call__(self, event: dict[str, Any]) -> None:
        """Takes one event."""
        now = time.monotonic()
        if event.get("event") != "progress" or now - self._last < self._every_s:
            return
        self._last = now
        if "message" in event:
            self._log(f"{self._what}: {event['message']}")
            return
        done, elapsed = event["done"], max(event["elapsed_s"], 1e-9)
        left = event["total"] - event["reused"] - done
        tokens = event["prompt_tokens"] + event["new_tokens"]
        eta = f"ETA {left * elapsed / done:.0f} s" if done else "no row finished yet"
        self._log(
            f"{self._what}: {event['reused'] + done}/{event['total']} rows, {tokens / elapsed:.0f} tokens/s, {eta}"
        )
