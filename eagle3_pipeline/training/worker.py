"""The training worker, alone or one of torchrun's: `python -m eagle3_pipeline.training.worker SPEC.json`.

Events go to standard output. SPEC.json holds what `job.Job` describes; job "simulate" takes a list of `checkpoints`.
Job "train" ends with `result` {metrics, stopped_early} (of the first rank), job "simulate" with `result` {simulations:
a {full_acc, acceptance_length, ...} a checkpoint}; a failure ends with `error` and exit code 1.
"""

import json
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

from eagle3_pipeline.errors import Eagle3Error, TrainingError
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.workers import claim_stdout, emit


def main(spec_path: Path) -> int:
    """Runs the job of a spec file and returns the exit code."""
    send = partial(emit, claim_stdout())
    try:
        spec = json.loads(spec_path.read_text())
        job = Job.parse(spec)
        # Imported late, so that a wrong import is an event too.
        if job.kind == "train":
            from eagle3_pipeline.training.loop import train

            result = train(job, send)
        elif job.kind == "simulate":
            from eagle3_pipeline.training.simulate import simulate

            jobs = [replace(job, checkpoint=Path(path) if path else None) for path in spec["checkpoints"]]
            result = {"simulations": [simulate(one, send) for one in jobs]}
        else:
            raise TrainingError(f"{spec_path}: job is {job.kind!r}, expected train or simulate")
    except Exception as error:
        traceback.print_exc()
        send("error", message=_explain(error))
        return 1
    if result:
        send("result", **result)
    return 0


def _explain(error: Exception) -> str:
    if isinstance(error, Eagle3Error):
        return str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return f"out of GPU memory: lower training.batch_tokens and raise training.accumulate to match ({error})"
    return f"{type(error).__name__}: {error} (the traceback is in the worker's log)"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
