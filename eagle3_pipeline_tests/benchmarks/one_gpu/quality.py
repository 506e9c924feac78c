"""`python -m eagle3_pipeline_tests.benchmarks.one_gpu.quality --home H --out O STEP...`: how good a draft becomes.

SmolLM2-135M-Instruct answers some 12,000 prompts; drafts learn from 1,000, 4,000 and all of them, and from all with the
default recipe of `speculators train` for the same time; vLLM serves them. Steps, each of which goes on where an earlier
call was cut off:

    data            answers, states and the baseline
    train[-NAME]    a draft: without a name of all data; 1k, 4k, muon, ttt5
    usual           `speculators train` on the same data
    serve[-NAME]-K  serves a draft with K drafted tokens; NAME may be usual too
    table           all that is known, as quality.json

Two processes with the same --home may run different steps after `data`: they share a pool of GPUs and the store.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from eagle3_pipeline.engine.devices import count_gpus
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report, made_folder
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_chain import DRAFTS, FULL, ON_CPU, ON_GPU, SPEED, USUAL, Quality
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_table import fill_data, fill_served, fill_table, fill_trained
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_usual import train_usual

_SERVE = re.compile(r"serve(?:-(\w+))?-(\d+)")
_TRAIN = re.compile(r"train(?:-(\w+))?")


def main() -> int:
    """Runs the steps in the order given; the exit code."""
    arguments = _parse()
    os.environ["EAGLE3_HOME"] = str(arguments.home)
    if arguments.rehearse:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    num_gpus = 0 if arguments.rehearse else arguments.gpus or count_gpus()
    name = "quality" if arguments.steps == ["table"] else f"quality-{'-'.join(arguments.steps)}"
    report = Report(arguments.out / f"{name}.json", num_gpus, arguments.budget_s)
    training = {
        key: getattr(arguments, key)
        for key in ("lr", "num_workers", "attention")
        if getattr(arguments, key) is not None
    }
    sizes = ON_CPU if arguments.rehearse else ON_GPU
    epochs = arguments.epochs
    quality = Quality(arguments.home, sizes, num_gpus, arguments.train_s, epochs, training, report.log)
    quality.prepare(arguments.gguf_parts)
    try:
        for step in arguments.steps:
            report.step(step, _needs_s(step, arguments), partial(_run, _work(step, quality, report, arguments)))
            if not arguments.keep_engines:
                quality.retire()
        failed = bool([check for check in report.checks if not check["passed"]])
    finally:
        report.finish()
    return int(failed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", metavar="STEP", type=_step)
    parser.add_argument("--home", type=made_folder, required=True, help="kept between calls")
    parser.add_argument("--out", type=made_folder, required=True, help="folder of the results")
    parser.add_argument("--gguf-parts", type=Path, help="folder of the parts of SmolLM2's GGUF file")
    parser.add_argument("--gpus", type=int, help="GPUs of the pool; default: what the driver reports")
    parser.add_argument("--train-s", type=float, default=240.0, help="seconds that training on all data may take")
    parser.add_argument("--epochs", type=int, help="instead of a number that fits --train-s")
    parser.add_argument("--lr", type=float, help="peak learning rate of this project's drafts")
    parser.add_argument("--num-workers", type=int, help="data-loader processes of this project's training")
    parser.add_argument("--attention", help="of this project's training, if flex_attention does not compile: sdpa")
    parser.add_argument("--usual-attention", help="the same of the usual training")
    parser.add_argument("--usual-epochs", type=int, help="default: as many as this project's draft of all data")
    parser.add_argument("--usual-s", type=float, help="default: as long as this project's draft of all data took")
    parser.add_argument("--usual-workers", type=int, default=6, help="data-loader processes of the usual training")
    parser.add_argument("--budget-s", type=float, default=545.0, help="what still runs then is killed")
    parser.add_argument("--keep-engines", action="store_true", help="for the next call")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    return parser.parse_args()


def _step(name: str) -> str:
    """An argument's type: the name of a step."""
    served, trained = _SERVE.fullmatch(name), _TRAIN.fullmatch(name)
    draft = (served or trained or [None, None])[1]
    known = draft is None or (draft in DRAFTS and draft != SPEED and not (trained and draft == USUAL))
    if name in ("data", "usual", "table") or ((served or trained) and known):
        return name
    raise argparse.ArgumentTypeError(f"unknown step {name}")


def _needs_s(step: str, arguments: argparse.Namespace) -> float:
    """Seconds without which a step is not begun: what is cut off in these starts anew."""
    if arguments.rehearse:
        return 0.0
    if step == "usual":
        return (arguments.usual_s or arguments.train_s) + 100
    return 130.0 if step.startswith("serve") else 0.0


def _run(works: tuple[Callable[[], object], ...]) -> None:
    for work in works:
        work()


def _work(
    step: str, quality: Quality, report: Report, arguments: argparse.Namespace
) -> tuple[Callable[[], object], ...]:
    """What a step does, and its rows, which are there whatever becomes of the next step."""
    if served := _SERVE.fullmatch(step):
        draft = served[1] or FULL, int(served[2])
        return partial(quality.serve, *draft), partial(fill_served, quality, report, *draft)
    if trained := _TRAIN.fullmatch(step):
        name = trained[1] or FULL
        return partial(quality.train, name), partial(fill_trained, quality, report, name)
    if step == "usual":
        limits = arguments.usual_s, arguments.usual_epochs, arguments.usual_workers
        return (partial(train_usual, quality, *limits, arguments.usual_attention),)
    if step == "table":
        return (partial(fill_table, quality, report),)
    return quality.make_data, partial(fill_data, quality, report)


if __name__ == "__main__":
    sys.exit(main())
