"""`python -m eagle3_pipeline.training.torchrun NUM_PROCESSES SPEC.json`: training workers under torchrun on this host.

A process of ours around torchrun's: it ends when the run that started it is killed, and torchrun's workers with it.
"""

import os
import sys

from torch.distributed import run

from eagle3_pipeline.workers import join_lease


def main(num_processes: str, spec_path: str) -> None:
    """Runs the workers and exits as they do."""
    join_lease()
    # NVLink multicast needs a service that not every host runs.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    arguments = ["--standalone", "--nproc-per-node", num_processes, "-m", "eagle3_pipeline.training.worker", spec_path]
    run.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
