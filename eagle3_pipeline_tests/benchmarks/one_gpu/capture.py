"""Prefill of stored sequences and generation: a plain engine, this project, the usual client."""

import mmap
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline_tests.benchmarks.multi_gpu import weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import Tokens, disk_gib_per_s, draw_sequences, relative
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.one_gpu.publishing import capture_context, publish
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import LARGE, SMALL, Generation, Load, Sizes
from eagle3_pipeline_tests.benchmarks.one_gpu.usual_client import UsualClient
from eagle3_pipeline_tests.state_parity import captured_states, reference_states

PLAIN, OURS, CLIENT = "plain prefill", "this project, to the published manifest", "usual client"
_TOLERANCE = 0.06
_GREEDY = {"temperature": 0.0, "max_tokens": 1}


@dataclass(frozen=True)
class _Model:
    """A verifier behind two engines, one plain, one that captures; `changes` of their specs."""

    name: str
    plain: StageContext
    ours: StageContext
    changes: dict[str, Any]

    def __post_init__(self) -> None:
        capturing = self.ours.capturing_engine_spec
        self.ours.capturing_engine_spec = lambda: replace(capturing(), **self.changes)  # type: ignore[method-assign]

    def engine(self, captures: bool) -> EngineSpec:
        return self.ours.capturing_engine_spec() if captures else replace(self.plain.engine_spec(), **self.changes)


class Capture:
    """The part `capture`: all measurements of engines on one GPU.

    Engines that are compared start together and share the GPU, each with a part of its memory; only one works at a
    time.

    Args:
        report: takes rows and checks.
        sizes: of models and data.
        home: folder of models, engines and shards.
        num_gpus: 1; 0: a rehearsal.
    """

    def __init__(self, report: Report, sizes: Sizes, home: Path, num_gpus: int) -> None:
        self.report, self.sizes, self.home, self.num_gpus = report, sizes, home, num_gpus

    def run(self) -> None:
        """The most telling first."""
        step, sizes = self.report.step, self.sizes
        writing = []
        if sizes.small_loads:
            writing.append(weights.start(self.home / "small", sizes.small, head_only=False))
        if sizes.large_loads:
            writing.append(weights.start(self.home / "large", sizes.large, head_only=True))
        try:
            step("touching memory", 10, self._touch_memory)
            step("writing the verifiers", 10, lambda: [process.wait() for process in writing])
            disk = step("disk", 2, lambda: disk_gib_per_s(self.home, 2**28 if not self.num_gpus else 2**31))
            self.report.row("disk", "write and flush", disk or 0.0, "GiB/s")
        finally:
            for process in writing:
                process.kill()
        dummy = {"load_format": "dummy"}
        small = self._model(SMALL, "small", self._longest(True), {}) if sizes.small_loads else None
        large = self._model(LARGE, "large", self._longest(False), dummy) if sizes.large_loads else None
        models = [model for model in (small, large) if model]
        client = self._client(small) if small else None
        try:
            step("starting all engines", sizes.start_s, lambda: self._start(models))
            if small and client:
                self._run_small(small, client)
            if large:
                self._run_large(large)
        finally:
            if client:
                client.stop()
            for model in models:
                for context in (model.plain, model.ours):
                    context.engines.stop_all(self.report.log)

    def _client(self, model: "_Model") -> UsualClient:
        folder, verifier = self.home / "client", self.home / "small"
        return UsualClient(folder, verifier, self._layers(model), self._server_arguments())

    def _run_small(self, model: "_Model", client: UsualClient) -> None:
        step = self.report.step
        step("starting the usual client's server", 0, lambda: client.wait_ready(self.sizes.start_s))
        step("parity", 30, lambda: self._parity(model))
        for load in self.sizes.small_loads:
            step(f"{SMALL}, {load.mean_tokens} tokens", 30, partial(self._measure, model, load))
            step("usual client", 60, partial(self._usual, client, model, load))
        client.stop()
        step(f"{SMALL}, generation", 40, lambda: self._generate(model, self.sizes.small_generation))

    def _run_large(self, model: "_Model") -> None:
        for load in self.sizes.large_loads:
            self.report.step(f"{LARGE}, {load.mean_tokens} tokens", 30, partial(self._measure, model, load))
        self.report.step(f"{LARGE}, generation", 40, lambda: self._generate(model, self.sizes.large_generation))

    def _touch_memory(self) -> None:
        """A virtual machine may be given its memory as it is used, slower than its disk is written.

        That is no matter of capture, and the files of a load's states take as much of it.
        """

        def touch(_: int) -> np.ndarray:
            block = np.zeros(2**30, dtype=np.uint8)
            block[:: mmap.PAGESIZE] = 1
            return block

        with ThreadPoolExecutor(4) as pool:
            touched = list(pool.map(touch, range(self.sizes.touched_gib)))
        self.report.log(f"{len(touched)} GiB were touched")

    def _longest(self, small: bool) -> int:
        sizes = self.sizes
        loads, generation = (
            (sizes.small_loads, sizes.small_generation) if small else (sizes.large_loads, sizes.large_generation)
        )
        return max([generation.longest, *(1 + load.mean_tokens * 6 // 5 for load in loads)])

    def _model(self, name: str, folder: str, longest: int, changes: dict[str, Any]) -> "_Model":
        cache = self.sizes.small_kvcache_gib if name == SMALL else self.sizes.large_kvcache_gib
        model, sizes, log = self.home / folder, self.sizes, self.report.log
        plain, ours = (
            capture_context(self.home / f"{folder}-{kind}", model, longest, self.num_gpus, sizes, log, cache)
            for kind in ("plain", "ours")
        )
        return _Model(name, plain, ours, changes)

    def _layers(self, model: "_Model") -> tuple[int, ...]:
        return model.ours.verifier.geometry(model.ours.spec.capture).layer_ids

    def _server_arguments(self) -> dict[str, object]:
        arguments: dict[str, object] = {
            "dtype": "bfloat16",
            "max-model-len": self._longest(True) + 1,
            "max-num-batched-tokens": self.sizes.batch_tokens,
            "max-num-seqs": self.sizes.batch_sequences,
        }
        if not self.num_gpus:
            return arguments | {"enforce-eager": True}
        cache = round(self.sizes.small_kvcache_gib * 2**30)
        return arguments | {"gpu-memory-utilization": self.sizes.utilization, "kv-cache-memory-bytes": cache}

    def _start(self, models: list["_Model"]) -> None:
        """Starts all engines together and warms them up."""

        def start(job: tuple[_Model, bool]) -> None:
            model, captures = job
            name = f"start of the {'capturing' if captures else 'plain'} engine"
            context = model.ours if captures else model.plain
            with context.engines.acquire(model.engine(captures), context.log) as client:
                self.report.row(model.name, name, client.waited_s, "s")
            self.report.row(model.name, name.replace("start", "KV cache"), _kv_tokens(context.engines.folder), "tokens")

        at_once = 2 * len(models) if self.num_gpus else 1
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(start, [(model, captures) for model in models for captures in (False, True)]))

    def _measure(self, model: "_Model", load: Load) -> None:
        sequences = self._draw(model, load)
        num_tokens = sum(len(ids) - 1 for ids in sequences.values())
        part = f"{model.name}, {load.mean_tokens} tokens"
        for captures in (False, True):
            self._prefill(model, captures, f"{part} warm-up", dict(list(sequences.items())[:8]))
        speed = self._prefill(model, False, part, {name: ids[:-1] for name, ids in sequences.items()})
        plain = num_tokens / speed["engine_s"]
        wall_s, published = publish(model.ours, part, sequences, load.num_chunks, self.sizes.chunks_at_once)
        self.report.check(f"{part}: the states of every token are published", published == num_tokens, published)
        self.report.row(part, PLAIN, plain, "tok/s")
        self.report.row(part, OURS, num_tokens / wall_s, "tok/s")
        written = num_tokens * len(self._layers(model)) * model.ours.verifier.hidden_size * 2
        self.report.row(part, "states written", written / wall_s / 1e9, "GB/s")
        self.report.row(part, "this project / plain prefill", num_tokens / wall_s / plain)
        for shard in (model.ours.store.root / "objects").rglob("shard-*"):
            shard.unlink()

    def _usual(self, client: UsualClient, model: "_Model", load: Load) -> None:
        if not load.num_client:
            return
        few = {name: ids[:-1] for name, ids in list(self._draw(model, load).items())[: load.num_client]}
        elapsed = client.capture(f"load-{load.mean_tokens}", few, self.sizes.concurrency)
        self.report.row(
            f"{model.name}, {load.mean_tokens} tokens", CLIENT, sum(map(len, few.values())) / elapsed, "tok/s"
        )

    def _draw(self, model: "_Model", load: Load) -> Tokens:
        return draw_sequences(load.num_sequences, load.mean_tokens, model.plain.verifier.vocab_size, load.mean_tokens)

    def _prefill(self, model: "_Model", captures: bool, what: str, sequences: Tokens) -> dict[str, float]:
        rows = [{"sequence_id": name, "input_ids": ids.tolist()} for name, ids in sequences.items()]
        context = model.ours if captures else model.plain
        folder = context.home / "prefills" / digest(what)
        states = folder / "states" if captures else None
        batch = PromptBatch(what, folder, rows, _GREEDY, states)
        speed = run_prompts(context, model.engine(captures), batch)[1]
        shutil.rmtree(folder)
        return speed

    def _parity(self, model: "_Model") -> None:
        """Layers of some captured sequences against Transformers in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        context = model.ours
        sequences = draw_sequences(
            self.sizes.num_compared, self.sizes.small_loads[0].mean_tokens, context.verifier.vocab_size, 1
        )
        publish(context, "parity", sequences, 1, 1)
        found = captured_states(context.upstream(ids.HIDDEN_STATES, digest("parity-0")))
        reference = AutoModelForCausalLM.from_pretrained(self.home / "small", dtype=torch.float32)
        # With a thread a core, one that shares its core holds up all others.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 4))
        layers = self._layers(model)
        errors = {layer: 0.0 for layer in layers}
        neighbours = []
        for name, tokens in sequences.items():
            expected = reference_states(reference, tokens[:-1].tolist())
            for position, layer in enumerate(layers):
                errors[layer] = max(errors[layer], relative(found[name][:, position], expected[layer]))
                neighbours.append(relative(found[name][:, position], expected[layer - 1]))
        for layer, error in errors.items():
            self.report.row("parity", f"largest relative error of layer {layer}", error)
        self.report.check("captured states are those of Transformers", max(errors.values()) < _TOLERANCE, errors)
        self.report.check(
            "neighbouring layers are told apart", min(neighbours) > 2 * max(errors.values()), min(neighbours)
        )

    def _generate(self, model: "_Model", size: Generation) -> None:
        """Sampling alone, with capture in the same pass, and capture in a second pass."""
        prompts = draw_sequences(size.num_prompts, size.prompt_tokens, model.plain.verifier.vocab_size, 3)
        for captures in (False, True):
            self._answer(model, captures, prompts, (8,) * len(size.lengths))
        answers, plain_s = self._answer(model, False, prompts, size.lengths)
        _, one_pass_s = self._answer(model, True, prompts, size.lengths)
        new = sum(map(len, answers.values()))
        whole = {name: np.asarray([*tokens, *answers[name]][:-1], dtype=np.int32) for name, tokens in prompts.items()}
        second_s = self._prefill(model, True, "second pass", whole)["engine_s"]
        part = f"{model.name}, generation"
        self.report.row(part, "plain", new / plain_s, "new tok/s")
        self.report.row(part, "with capture in the same pass", new / one_pass_s, "new tok/s")
        self.report.row(part, "plain, then capture in a second pass", new / (plain_s + second_s), "new tok/s")
        self.report.row(part, "one pass slower than plain by", 100 * (one_pass_s / plain_s - 1), "%")

    def _answer(
        self, model: "_Model", captures: bool, prompts: Tokens, lengths: tuple[int, ...]
    ) -> tuple[dict[str, list[int]], float]:
        """Answers by sequence id, and the seconds that they took; as many jobs at once as there are lengths."""
        context, items = model.ours if captures else model.plain, list(prompts.items())
        folder = context.home / "generation"

        def run(number: int) -> dict[str, dict]:
            own = folder / str(number)
            rows = [{"sequence_id": name, "input_ids": t.tolist()} for name, t in items[number :: len(lengths)]]
            temperature = 0.7 if self.num_gpus else 0.0
            sampling = {"temperature": temperature, "max_tokens": lengths[number], "ignore_eos": True}
            states = own / "states" if captures else None
            batch = PromptBatch(f"generating {number}", own, rows, sampling, states, include_output=captures)
            return run_prompts(context, model.engine(captures), batch)[0]

        started = time.monotonic()
        with ThreadPoolExecutor(len(lengths)) as pool:
            found = list(pool.map(run, range(len(lengths))))
        elapsed = time.monotonic() - started
        shutil.rmtree(folder)
        return {name: row["token_ids"] for rows in found for name, row in rows.items()}, elapsed


def _kv_tokens(folder: Path) -> float:
    """Tokens that the engine's cache holds, by its own log."""
    for log in sorted(folder.rglob("*.log")):
        if found := re.search(r"KV cache size: ([\d,]+) tokens", log.read_text(errors="replace")):
            return float(found.group(1).replace(",", ""))
    return 0.0
