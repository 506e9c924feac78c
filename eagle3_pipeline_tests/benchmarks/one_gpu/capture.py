"""Prefill of stored sequences and generation: a plain engine, this project, the usual client."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.sequences import Sequence
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.prompting import PromptBatch, run_prompts
from eagle3_pipeline.stages.verifier_outputs import _write_sequences, materialise_outputs
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline_tests.benchmarks.multi_gpu import weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import Tokens, disk_gib_per_s, draw_sequences, relative
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.one_gpu.sizes import LARGE, SMALL, Load, Sizes
from eagle3_pipeline_tests.benchmarks.one_gpu.usual_client import UsualClient
from eagle3_pipeline_tests.state_parity import captured_states, reference_states
from eagle3_pipeline_tests.tiny_model import make_tokenizer

PLAIN, OURS, CLIENT = "plain prefill", "this project, to the published manifest", "usual client"
_TOLERANCE = 0.06
_GREEDY = {"temperature": 0.0, "max_tokens": 1}


class Capture:
    """All measurements of one GPU.

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
        step, start = self.report.step, self.sizes.start_s
        writing = [
            weights.start(self.home / "small", self.sizes.small, head_only=False),
            weights.start(self.home / "large", self.sizes.large, head_only=True),
        ]
        try:
            step("writing the verifiers", 10, lambda: [process.wait() for process in writing])
            disk = step("disk", 2, lambda: disk_gib_per_s(self.home, 2**28 if not self.num_gpus else 2**31))
            self.report.row("disk", "write and flush", disk or 0.0, "GiB/s")
            step(SMALL, start + 120, self._small)
            step(LARGE, start + 30, self._large)
        finally:
            for process in writing:
                process.kill()

    def _context(self, name: str, model: str, longest: int) -> StageContext:
        """A home, and so a pool, of its own: engines that share the GPU do not wait for each other's lease."""
        spec = PipelineSpec.model_validate(
            {
                "name": "bench",
                "verifier": {"model": str(self.home / model), "dtype": "bfloat16"},
                "dataset": {"path": "none"},
                "generation": {"mode": "passthrough", "max_new_tokens": 8, "max_sequence_tokens": longest},
                "training": {"batch_tokens": longest},
                "resources": {
                    "gpu_memory_utilization": self.sizes.utilization,
                    "max_num_batched_tokens": self.sizes.batch_tokens,
                    "max_num_seqs": self.sizes.batch_sequences,
                    "idle_timeout_s": 900.0,
                },
            }
        )
        return StageContext(spec, self.report.log, self.home / name, self.num_gpus)

    def _small(self) -> None:
        longest = 1 + max(load.mean_tokens for load in self.sizes.small_loads) * 6 // 5
        longest = max(longest, self.sizes.prompt_tokens * 6 // 5 + self.sizes.new_tokens)
        make_tokenizer(self.home / "small")
        plain, ours = (self._context(name, "small", longest) for name in ("small-plain", "small-ours"))
        client = UsualClient(
            self.home / "client", self.home / "small", self._layers(ours), self._server_arguments(longest)
        )
        try:
            engines = self._start(SMALL, {"plain": (plain, {}), "capturing": (ours, {})})
            client.wait_ready(self.sizes.start_s * 2)
            for load in self.sizes.small_loads:
                self._measure(SMALL, load, plain, ours, client, {})
            self._parity(ours)
            self._generate(plain, ours)
            self.report.row(SMALL, "KV cache, plain engine", _kv_tokens(engines["plain"]), "tokens")
            self.report.row(SMALL, "KV cache, capturing engine", _kv_tokens(engines["capturing"]), "tokens")
        finally:
            client.stop()
            for context in (plain, ours):
                context.engines.stop_all(self.report.log)

    def _large(self) -> None:
        longest = 1 + max(load.mean_tokens for load in self.sizes.large_loads) * 6 // 5
        make_tokenizer(self.home / "large")
        plain, ours = (self._context(name, "large", longest) for name in ("large-plain", "large-ours"))
        dummy = {"load_format": "dummy"}
        try:
            self._start(LARGE, {"plain": (plain, dummy), "capturing": (ours, dummy)})
            for load in self.sizes.large_loads:
                self._measure(LARGE, load, plain, ours, None, dummy)
        finally:
            for context in (plain, ours):
                context.engines.stop_all(self.report.log)

    def _layers(self, context: StageContext) -> tuple[int, ...]:
        return context.verifier.geometry(context.spec.capture).layer_ids

    def _server_arguments(self, longest: int) -> dict[str, object]:
        arguments: dict[str, object] = {
            "dtype": "bfloat16",
            "max-model-len": longest + 1,
            "max-num-batched-tokens": self.sizes.batch_tokens,
            "max-num-seqs": self.sizes.batch_sequences,
        }
        return arguments | (
            {"gpu-memory-utilization": self.sizes.utilization} if self.num_gpus else {"enforce-eager": True}
        )

    def _start(self, model: str, wanted: dict[str, tuple[StageContext, dict]]) -> dict[str, Path]:
        """Starts the engines together, and warms them up; their state folders."""

        def start(name: str) -> tuple[str, Path]:
            context, changes = wanted[name]
            with context.engines.acquire(_engine(context, name == "capturing", changes), context.log) as client:
                self.report.row(model, f"start of the {name} engine", client.waited_s, "s")
                return name, context.engines.folder

        with ThreadPoolExecutor(len(wanted)) as pool:
            return dict(pool.map(start, wanted))

    def _measure(
        self,
        model: str,
        load: Load,
        plain: StageContext,
        ours: StageContext,
        client: UsualClient | None,
        changes: dict[str, Any],
    ) -> None:
        vocab = plain.verifier.vocab_size
        sequences = draw_sequences(load.num_sequences, load.mean_tokens, vocab, load.mean_tokens)
        num_tokens = sum(len(ids) - 1 for ids in sequences.values())
        part = f"{model}, {load.mean_tokens} tokens"
        for name, context in (("plain", plain), ("capturing", ours)):
            self._prefill(
                context,
                _engine(context, name == "capturing", changes),
                f"{part} warm-up",
                dict(list(sequences.items())[:8]),
            )
        without_last = {name: ids[:-1] for name, ids in sequences.items()}
        speed = self._prefill(plain, _engine(plain, False, changes), part, without_last)
        plain_speed = num_tokens / speed["engine_s"]
        self.report.row(part, PLAIN, plain_speed, "tok/s")
        metrics, wall_s = self._publish(ours, part, sequences, changes)
        in_engine = num_tokens / metrics["engine_s"]
        published = num_tokens / wall_s
        self.report.row(part, "this project, engine alone", in_engine, "tok/s")
        self.report.row(part, OURS, published, "tok/s")
        self.report.row(
            part,
            "states written",
            num_tokens * len(self._layers(ours)) * ours.verifier.hidden_size * 2 / wall_s / 1e9,
            "GB/s",
        )
        self.report.row(part, "this project / plain prefill", published / plain_speed)
        if client and load.num_client:
            few = dict(list(without_last.items())[: load.num_client])
            elapsed = client.capture(f"load-{load.mean_tokens}", few, self.sizes.concurrency)
            usual = sum(map(len, few.values())) / elapsed
            self.report.row(part, CLIENT, usual, "tok/s")
            self.report.row(part, "this project / usual client", published / usual)

    def _prefill(self, context: StageContext, engine: EngineSpec, what: str, sequences: Tokens) -> dict[str, float]:
        rows = [{"sequence_id": name, "input_ids": ids.tolist()} for name, ids in sequences.items()]
        folder = context.home / "prefills" / digest(what)
        states = folder / "states" if engine.layer_ids else None
        return run_prompts(context, engine, PromptBatch(what, folder, rows, _GREEDY, states))[1]

    def _publish(
        self, context: StageContext, name: str, sequences: Tokens, changes: dict[str, Any]
    ) -> tuple[dict[str, float], float]:
        """Publishes sequences, then times the stage that captures them; its metrics and seconds to the manifest."""
        rows = [
            Sequence(key, key, 0, ids.tolist(), [False] + [True] * (len(ids) - 1), 1, "", "", "data")
            for key, ids in sequences.items()
        ]
        chunk = digest(name)
        identity = ids.generations_identity(context.spec, context.verifier, chunk)
        context.materialise(
            identity, chunk, lambda writer: _write_sequences(context, chunk, identity, writer, rows, [], {})
        )
        if changes:
            capturing = context.capturing_engine_spec
            context.capturing_engine_spec = lambda: replace(capturing(), **changes)  # type: ignore[method-assign]
        made = materialise_outputs(context, chunk, generations=False)
        assert made.hidden_states
        return dict(made.hidden_states.manifest.metrics), made.hidden_states.manifest.wall_s

    def _parity(self, context: StageContext) -> None:
        """Layers of some captured sequences against Transformers in float32."""
        import torch
        from transformers import AutoModelForCausalLM

        sequences = draw_sequences(
            self.sizes.num_compared, self.sizes.small_loads[0].mean_tokens, context.verifier.vocab_size, 1
        )
        self._publish(context, "parity", sequences, {})
        found = captured_states(context.upstream(ids.HIDDEN_STATES, digest("parity")))
        model = AutoModelForCausalLM.from_pretrained(self.home / "small", dtype=torch.float32)
        layers = self._layers(context)
        errors = {layer: 0.0 for layer in layers}
        neighbours = []
        for name, tokens in sequences.items():
            expected = reference_states(model, tokens[:-1].tolist())
            for position, layer in enumerate(layers):
                errors[layer] = max(errors[layer], relative(found[name][:, position], expected[layer]))
                neighbours.append(relative(found[name][:, position], expected[layer - 1]))
        for layer, error in errors.items():
            self.report.row("parity", f"largest relative error of layer {layer}", error)
        self.report.check("captured states are those of Transformers", max(errors.values()) < _TOLERANCE, errors)
        self.report.check(
            "neighbouring layers are told apart", min(neighbours) > 2 * max(errors.values()), min(neighbours)
        )

    def _generate(self, plain: StageContext, ours: StageContext) -> None:
        """Sampling alone, with capture in the same pass, and capture in a second pass."""
        sizes = self.sizes
        prompts = draw_sequences(sizes.num_prompts, sizes.prompt_tokens, plain.verifier.vocab_size, 3)
        rows = [{"sequence_id": name, "input_ids": tokens.tolist()} for name, tokens in prompts.items()]
        sampling = {"temperature": 0.7 if self.num_gpus else 0.0, "max_tokens": sizes.new_tokens, "ignore_eos": True}
        new = sizes.num_prompts * sizes.new_tokens

        def run(context: StageContext, capture: bool) -> tuple[dict[str, dict], float]:
            folder = context.home / "generation"
            states = folder / "states" if capture else None
            batch = PromptBatch("generating", folder, rows, sampling, states, include_output=capture)
            answers, speed = run_prompts(context, _engine(context, capture, {}), batch)
            return answers, speed["engine_s"]

        answers, plain_s = run(plain, False)
        _, one_pass_s = run(ours, True)
        whole = {
            name: np.asarray([*prompts[name][:], *answers[name]["token_ids"]][:-1], dtype=np.int32) for name in prompts
        }
        second_s = self._prefill(ours, _engine(ours, True, {}), "second pass", whole)["engine_s"]
        self.report.row("generation", "plain", new / plain_s, "new tok/s")
        self.report.row("generation", "with capture in the same pass", new / one_pass_s, "new tok/s")
        self.report.row("generation", "plain, then capture in a second pass", new / (plain_s + second_s), "new tok/s")
        self.report.row("generation", "one pass slower than plain by", one_pass_s / plain_s - 1)


def _engine(context: StageContext, capture: bool, changes: dict[str, Any]) -> EngineSpec:
    spec = context.capturing_engine_spec() if capture else context.engine_spec()
    return replace(spec, **changes)


def _kv_tokens(folder: Path) -> float:
    """Tokens that the engine's cache holds, by its own log."""
    for log in sorted(folder.rglob("*.log")):
        if found := re.search(r"KV cache size: ([\d,]+) tokens", log.read_text(errors="replace")):
            return float(found.group(1).replace(",", ""))
    return 0.0
