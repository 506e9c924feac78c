"""Writes docs/verifiers.md: `python -m eagle3_pipeline_tests.families`; with names of families: prints their rows."""

import shutil
import sys
import tempfile
from pathlib import Path

from eagle3_pipeline_tests.families.builders import KINDS
from eagle3_pipeline_tests.families.static import look_at
from eagle3_pipeline_tests.families.table import DOC, write_table


def main(kinds: list[str]) -> None:
    """One row after the other; each model is removed when it was looked at."""
    lines = []
    for kind in kinds or KINDS:
        folder = Path(tempfile.mkdtemp()) / kind
        lines.append(look_at(kind, folder).line())
        shutil.rmtree(folder.parent)
        print(lines[-1], flush=True)
    if not kinds:
        DOC.write_text(write_table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
