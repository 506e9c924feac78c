"""`python -m eagle3_pipeline_tests.benchmarks.multi_gpu --gpus N --out FOLDER`: one table for N GPUs of this host.

`--gpus 0` rehearses on a machine without GPUs: two made-up devices, tiny sizes, real vLLM and training on the CPU.
Exit code 0: all was run, all checks passed. Rows and checks are in FOLDER/multi_gpu.json as soon as they are known.
"""

import argparse
import os
import sys
from pathlib import Path

from eagle3_pipeline.engine.devices import count_gpus
from eagle3_pipeline_tests.benchmarks.multi_gpu.engines import Engines
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report, made_folder, run_in_home
from eagle3_pipeline_tests.benchmarks.multi_gpu.resume import Resume
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import ON_CPU, ON_GPU
from eagle3_pipeline_tests.benchmarks.multi_gpu.training import Training

PARTS: dict[str, type[Engines] | type[Training]] = {"engines": Engines, "training": Training, "resume": Resume}
_MADE_UP = 2


def main() -> int:
    """Runs the parts; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs to use, 2 or more; 0: a rehearsal on the CPU")
    parser.add_argument("--out", type=made_folder, required=True, help="folder of the results and of logs")
    parser.add_argument("--part", choices=list(PARTS), action="append", help="default: all")
    parser.add_argument("--budget-s", type=float, default=3600.0, help="what does not fit is reported as not run")
    parser.add_argument("--work", type=made_folder, help="parent of the temporary folder of models and shards")
    arguments = parser.parse_args()
    if arguments.gpus not in (0, *range(2, count_gpus() + 1)):
        parser.error(f"--gpus {arguments.gpus}: this machine has {count_gpus()} GPUs; 2 or more, or 0")
    real = arguments.gpus > 0
    if not real:
        # Two workers on one node, and none of them with more threads than there are cores.
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    report = Report(arguments.out / "multi_gpu.json", arguments.gpus, arguments.budget_s)

    def work(home: Path) -> None:
        for name in arguments.part or PARTS:
            PARTS[name](report, ON_GPU if real else ON_CPU, home / name, arguments.gpus or _MADE_UP).run()

    return run_in_home(report, arguments.work, arguments.out / "logs.tar.gz", work)


if __name__ == "__main__":
    sys.exit(main())
