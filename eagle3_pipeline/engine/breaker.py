"""Circuit breaker: an engine spec that keeps dying fails at once instead of loading again.

An engine whose answers were proved wrong decodes nothing more that is kept; it may prefill.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_pipeline.store import atomic

_TRIPS_AT = 2
# A host exits with this code if its engine core was killed while it loaded: no fault of the settings.
CORE_KILLED_EXIT_CODE = 3
_NAME = "failures.json"
_DISTRUST = "distrusted.json"


@dataclass(frozen=True)
class Failures:
    """What is known of an engine's deaths.

    Attributes:
        count: consecutive deaths.
        last: the last one's message.
        host: which host died last: every client of it tells of the same death.
        deterministic: the engine itself gave up its last start: one is enough, since it would again.
    """

    count: int = 0
    last: str = ""
    host: str = ""
    deterministic: bool = False

    @property
    def tripped(self) -> bool:
        """Whether further requests fail at once."""
        return self.deterministic or self.count >= _TRIPS_AT


def read_failures(folder: Path) -> Failures:
    """The record in an engine's state folder."""
    try:
        found = Failures(**json.loads((folder / _NAME).read_bytes()))
    except (OSError, ValueError, TypeError):
        return Failures()
    return found if isinstance(found.count, int) and isinstance(found.last, str) else Failures()


def record_failure(folder: Path, message: str, deterministic: bool, host: str) -> None:
    """Counts a death, once however many clients tell of it.

    Args:
        folder: the engine's state folder.
        message: shown to whoever asks next.
        deterministic: the engine exited by itself while starting; a signal or a crash at work is not.
        host: which host died.
    """
    with atomic.exclusive(folder / f"{_NAME}.lock", "record of failures", wait=True):
        known = read_failures(folder)
        if host and known.host == host:
            return
        atomic.write_json(folder / _NAME, asdict(Failures(known.count + 1, message, host, deterministic)))


def reset_failures(folder: Path) -> bool:
    """Forgets the deaths; says whether there were any."""
    path = folder / _NAME
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def distrust(folder: Path, reason: str) -> None:
    """Remembers that what this engine decoded was wrong."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write_json(folder / _DISTRUST, {"reason": reason})


def distrusted(folder: Path) -> str:
    """The reason given to `distrust`; empty: there is none."""
    try:
        return str(json.loads((folder / _DISTRUST).read_bytes())["reason"])
    except (OSError, ValueError, TypeError, KeyError):
        return ""


def forget_distrust(folder: Path) -> bool:
    """Trusts the engine's decoding again; says whether it was distrusted."""
    path = folder / _DISTRUST
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed
