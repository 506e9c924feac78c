"""`python -m eagle3_pipeline.training.torchrun NUM_PROCESSES SPEC.json`: training workers under torchrun on this host.

A process of ours around torchrun's: it ends when the run that started it is killed, and torchrun's workers with it.
"""

import os
import sys

from torch.distributed import run

from eagle3_pipeline.workers import avoid_multicast, join_lease


def main(num_processes: str, spec_path: str) -> None:
    """Runs the workers and exits as they do."""
    join_lease()
    avoid_multicast()
    # torchrun's own default is one thread, and packing a batch of states is work for several.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(num_processes))))
    arguments = ["--standalone", "--nproc-per-node", num_processes, "-m", "eagle3_pipeline.training.worker", spec_path]
    run.main(arguments)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
