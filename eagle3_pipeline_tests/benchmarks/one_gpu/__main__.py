"""`python -m eagle3_pipeline_tests.benchmarks.one_gpu --out FOLDER`: capture and generation on one GPU, one table.

`--rehearse` tries the script on a machine without a GPU, in small. Rows are in FOLDER/one_gpu.json as soon as they are
known. Weights are random: speed does not depend on them.
"""

import argparse
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.one_gpu.capture import Capture
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import ON_CPU, ON_GPU


def main() -> int:
    """Runs the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results and of logs")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="what does not fit is reported as not run")
    parser.add_argument("--work", type=Path, help="parent of the temporary folder of models and shards")
    arguments = parser.parse_args()
    if arguments.rehearse:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    arguments.out.mkdir(parents=True, exist_ok=True)
    report = Report(arguments.out / "one_gpu.json", 0 if arguments.rehearse else 1, arguments.budget_s)
    home = Path(tempfile.mkdtemp(prefix="one-gpu-", dir=arguments.work))
    report.before_giving_up = lambda: _keep_logs(home, arguments.out / "logs.tar.gz")
    try:
        Capture(report, ON_CPU if arguments.rehearse else ON_GPU, home, int(not arguments.rehearse)).run()
    finally:
        code = report.finish()
        report.before_giving_up()
        shutil.rmtree(home, ignore_errors=True)
    return code


def _keep_logs(home: Path, path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for log in home.rglob("*.log"):
            archive.add(log, log.relative_to(home))


if __name__ == "__main__":
    sys.exit(main())
