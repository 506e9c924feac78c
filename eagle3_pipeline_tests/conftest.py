"""Processes that tests start import what the tests import, whatever the folder they are called in."""

import os
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))
