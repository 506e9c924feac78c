"""Ends what a killed engine host leaves behind, at once: `python -m eagle3_pipeline.engine.reaper RECORD`.

It waits at a pipe that only the host holds; the kernel closes it however the host ends. Whoever takes the host's lease
would do the same, but until then the children would hold the GPU's memory.
"""

import json
import os
import subprocess
import sys
from typing import Any

from eagle3_pipeline.engine.lease import end_session


def start_reaper(record: dict[str, Any]) -> None:
    """In the host: starts the reaper of its session, in a session of the reaper's own.

    Args:
        record: the session, as `EngineState.session` describes it.
    """
    # The writing end is never closed, and no child inherits it: it ends with this process.
    reading, _ = os.pipe()
    command = [sys.executable, "-m", "eagle3_pipeline.engine.reaper", json.dumps(record)]
    subprocess.Popen(command, stdin=reading, stdout=subprocess.DEVNULL, start_new_session=True)
    os.close(reading)


def main(record: str) -> None:
    """Waits for the host's end."""
    sys.stdin.buffer.read()
    end_session(json.loads(record))


if __name__ == "__main__":
    main(sys.argv[1])
