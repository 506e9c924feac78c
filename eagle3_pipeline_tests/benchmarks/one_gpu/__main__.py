"""`python -m eagle3_pipeline_tests.benchmarks.one_gpu --out FOLDER`: capture, generation and training on one GPU.

`--rehearse` tries the script on a machine without a GPU, in small. Rows are in FOLDER/one_gpu.json as soon as they are
known. Weights are random: speed does not depend on them.
"""

import argparse
import os
import sys
from pathlib import Path

from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report, made_folder, run_in_home
from eagle3_pipeline_tests.benchmarks.one_gpu.capture import Capture
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import LARGE, ON_CPU, ON_GPU, SMALL
from eagle3_pipeline_tests.benchmarks.one_gpu.training import Training

PARTS: dict[str, type[Capture] | type[Training]] = {"capture": Capture, "training": Training}


def main() -> int:
    """Runs the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=made_folder, required=True, help="folder of the results and of logs")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="default: all")
    parser.add_argument("--shape", choices=(SMALL, LARGE), action="append", help="of models and drafts; default: all")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="what does not fit is reported as not run")
    parser.add_argument("--work", type=made_folder, help="parent of the temporary folder of models and shards")
    arguments = parser.parse_args()
    if arguments.rehearse:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    report = Report(arguments.out / "one_gpu.json", 0 if arguments.rehearse else 1, arguments.budget_s)
    sizes, num_gpus = (ON_CPU, 0) if arguments.rehearse else (ON_GPU, 1)
    if arguments.shape:
        sizes = sizes.only(arguments.shape)

    def work(home: Path) -> None:
        for name in arguments.part or PARTS:
            PARTS[name](report, sizes, home / name, num_gpus).run()

    return run_in_home(report, arguments.work, arguments.out / "logs.tar.gz", work)


if __name__ == "__main__":
    sys.exit(main())
