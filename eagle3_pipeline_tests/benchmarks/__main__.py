"""`make bench`: prints what this machine does, and writes it as JSON.

`python -m eagle3_pipeline_tests.benchmarks [capture] [scale] ...` runs some of the parts; without names, all.
"""

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

from tabulate import tabulate

from eagle3_pipeline_tests.benchmarks import backfill, capture, engine, host, orchestration, publish, scale, shards
from eagle3_pipeline_tests.benchmarks.machine import machine

PARTS = {
    "capture": capture.run,
    "shards": shards.run,
    "publish": publish.run,
    "host": host.run,
    "orchestration": orchestration.run,
    "scale": scale.run,
    "training": lambda: importlib.import_module(f"{__package__}.training").run(),
    "engine": engine.run,
    "backfill": backfill.run,
}


def main() -> None:
    """Runs the parts and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--output", type=Path, default=Path("bench.json"), help="JSON file of the results")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.parts or PARTS:
        print(f"measuring {name} ...", flush=True)
        results[name] = PARTS[name]()
    rows = [[part, what, value] for part, found in results.items() for what, value in found.items()]
    print(f"\n{machine()}\n")
    print(tabulate(rows, ["part", "measured", "value"], floatfmt=",.3f"))
    arguments.output.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")
    print(f"\nwritten to {arguments.output}")


if __name__ == "__main__":
    main()
