"""`make demo`: the whole chain on real input, through the Dagster instance that `make dev` opens."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pyarrow.parquet as pq
from tabulate import tabulate

from eagle3_pipeline.config import PipelineSpec, find_pipeline, project_home
from eagle3_pipeline.data.smollm2 import prepare_model, prepare_prompts
from eagle3_pipeline.evaluation.prompts import load_prompts
from eagle3_pipeline.evaluation.report import evaluation_table, simulation_table
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_evaluation import EVALUATION
from eagle3_pipeline.stages.published_draft import LINK

PIPELINE = "smollm2_demo"
_NUM_CHUNKS = 4
_SAMPLE_S = 2.0
_TAIL = (ids.VERIFIER, ids.BASELINE, ids.VOCAB_MAP, ids.DRAFT_CHECKPOINT, ids.DRAFT_EVALUATION)
Log = Callable[[str], None]


def run_demo(log: Log) -> None:
    """Prepares what is missing, runs what is stale, prints what came out.

    Raises:
        Eagle3Error: a stage failed; its message says where and what to do.
    """
    from eagle3_pipeline.assets import launch
    from eagle3_pipeline.definitions import build_definitions

    started = time.monotonic()
    spec = find_pipeline(PIPELINE)
    _prepare(spec, log)
    context = StageContext(spec, log)
    starts_before = len(context.engines.starts())
    memory = _PeakMemory(context)
    memory.start()
    with launch.open_instance() as instance:
        launch.sync_chunks(spec, instance, log)
        first = plan(context)
        if first.to_run:
            log(first.table())
            runner = launch.InProcess(build_definitions([spec]), instance, log)
            num_runs = launch.materialise_stale(spec, runner, log).num_runs
            context.engines.stop_all(log)
        else:
            log("Nothing is to be done: every stage of every chunk is fresh.")
            num_runs = 0
    starts = len(context.engines.starts()) - starts_before
    _print_results(context, log)
    log(f"\n{num_runs} Dagster runs, {starts} engine starts, {time.monotonic() - started:.0f} s, {memory.stop()}")
    log(f"The draft that vLLM serves: {context.references.folder / LINK}")
    log("Open the Dagster UI on these assets: make dev, then http://localhost:3000")


def _prepare(spec: PipelineSpec, log: Log) -> None:
    home = project_home()
    prepare_model(home / "models" / "SmolLM2-135M-Instruct", log)
    held_out = {text for prompt in load_prompts(spec.evaluation.prompts) for text in prompt.user_texts}
    count = _NUM_CHUNKS * spec.dataset.samples_per_chunk
    prepare_prompts(home / "data" / PIPELINE / "prompts.jsonl", count, held_out, log)


def _print_results(context: StageContext, log: Log) -> None:
    rows = [_stage_row(context, stage) for stage in (*ids.CHUNK_STAGES, *_TAIL)]
    headers = ["stage", "artifacts", "seconds", "tokens", "tok/s", "bytes", "engine starts"]
    log("\n" + tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 6)))
    evaluation = context.upstream(ids.DRAFT_EVALUATION)
    metrics = evaluation.manifest.metrics
    log("\n" + evaluation_table(pq.read_table(evaluation.path(EVALUATION)).to_pylist(), "simple"))
    log("\n" + simulation_table(metrics, "simple"))
    different, ties = int(metrics["num_differences"]), int(metrics["num_near_ties"])
    log(f"\nAnswers with the draft that differ from those without: {different}, of these near-ties: {ties}")


def _stage_row(context: StageContext, stage: str) -> list[Any]:
    keys = context.all_chunks() if stage in ids.CHUNK_STAGES else [None]
    manifests = [context.upstream(stage, key).manifest for key in keys]
    seconds = sum(m.wall_s for m in manifests)
    tokens = sum(m.metrics.get("num_tokens", m.metrics.get("num_new_tokens", 0)) for m in manifests)
    speeds = [m.metrics["tokens_per_s"] for m in manifests if "tokens_per_s" in m.metrics]
    speed = f"{sum(speeds) / len(speeds):,.0f}" if speeds else ""
    return [
        stage,
        len(manifests),
        f"{seconds:.1f}",
        f"{tokens:,.0f}" if tokens else "",
        speed,
        f"{sum(m.size_bytes for m in manifests):,}",
        f"{sum(m.metrics.get('num_engine_starts', 0) for m in manifests):.0f}",
    ]


class _PeakMemory(threading.Thread):
    """Samples the memory of this process, its children and all engines (resident less shared pages)."""

    def __init__(self, context: StageContext) -> None:
        super().__init__(daemon=True)
        self._context = context
        self._done = threading.Event()
        self._peak = 0

    def run(self) -> None:
        """Samples until `stop`."""
        while not self._done.wait(_SAMPLE_S):
            hosts = [state.read()["pid"] for state in self._context.engines.engines() if state.is_alive()]
            self._peak = max(self._peak, sum(_memory_of_tree(pid) for pid in (os.getpid(), *hosts)))

    def stop(self) -> str:
        """Ends the sampling and says the peak."""
        self._done.set()
        self.join()
        return f"peak memory {self._peak / 2**30:.1f} GiB"


def _memory_of_tree(pid: int) -> int:
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                memory = process.memory_info()
                total += memory.rss - memory.shared
    return total
