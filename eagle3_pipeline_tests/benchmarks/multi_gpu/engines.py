"""Engines on several GPUs: side by side, tensor-parallel, killed."""

import json
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline_tests.benchmarks.multi_gpu import leases, weights
from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import (
    Tokens,
    differences,
    disk_gib_per_s,
    draw_sequences,
    prefill,
)
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.benchmarks.multi_gpu.sizes import Sizes
from eagle3_pipeline_tests.tiny_kimi import make_tiny_kimi

MODEL = "verifier"
_KIMI = "tiny-kimi"
_WORK_S = 20.0


@dataclass(frozen=True)
class _Part:
    """An engine and what it is measured by; engines of one pool have GPUs of their own."""

    pool: str
    spec: EngineSpec
    what: str
    work: Callable[[EngineClient], None]


class Engines:
    """The part `engines`: everything runs through the manager, over one pool of GPUs.

    Args:
        report: takes rows and checks.
        sizes: of models and data.
        home: folder of engines, leases, models and shards.
        pool_gpus: GPUs of the pool; more than one.
    """

    def __init__(self, report: Report, sizes: Sizes, home: Path, pool_gpus: int) -> None:
        self.report, self.sizes, self.home, self.num = report, sizes, home, pool_gpus
        self.manager = EngineManager(home, pool_gpus)
        vocab, mean = sizes.verifier.vocab, sizes.sequence_tokens
        self.compared = draw_sequences(sizes.num_compared, mean, vocab, 1)
        self.measured = [draw_sequences(sizes.num_measured, mean, vocab, 2 + i) for i in range(pool_gpus)]
        self.alone_tokens_per_s = 0.0

    def run(self) -> None:
        """All steps, the most telling first."""
        writing = weights.start(self.home / MODEL, self.sizes.verifier, head_only=False)
        try:
            step = self.report.step
            step("leases", 10, lambda: leases.all_against_one(self.report, self.home / "lease-check", self.num))
            step("writing the verifier", 20, lambda: self._written(writing))
            # With experts that rounding chooses anew, states of two engines could not be compared.
            step("tiny Kimi", 5, lambda: make_tiny_kimi(self.home / _KIMI, dtype=self.sizes.kimi_dtype, steady=True))
            try:
                step(f"{self.num} engines of one GPU", self.sizes.start_s + 2 * _WORK_S, self.side_by_side)
            finally:
                self.manager.stop_all(self.report.log)
            step("engines that share the GPUs", self.sizes.start_s + 3 * _WORK_S, self.sharing)
        finally:
            writing.kill()

    def _written(self, writing: subprocess.Popen) -> None:
        started = time.monotonic()
        if writing.wait():
            raise RuntimeError(f"the verifier was not written (exit code {writing.returncode})")
        size = sum(path.stat().st_size for path in (self.home / MODEL).glob("*.safetensors"))
        self.report.row("verifier", "weights", size / 2**30, "GiB")
        self.report.row("verifier", "waited for", time.monotonic() - started, "s")
        self.report.row("disk", "write and flush", disk_gib_per_s(self.home, self.sizes.disk_bytes), "GiB/s")

    def _spec(self, gpus: int, capture: bool, **changes: object) -> EngineSpec:
        shape = self.sizes.verifier
        fields: dict = {
            "model_path": str(self.home / MODEL),
            "model_id": MODEL,
            "dtype": "bfloat16",
            "trust_remote_code": False,
            "max_model_len": self.sizes.sequence_tokens * 6 // 5 + 8,
            "num_gpus": gpus,
            "gpu_memory_utilization": self.sizes.utilization,
            "max_num_batched_tokens": 16384,
            "enforce_eager": True,
            "idle_timeout_s": 900.0,
            "lease_timeout_s": 120.0,
        }
        if capture:
            fields |= {"layer_ids": self.sizes.layer_ids, "hidden_size": shape.hidden, "max_shard_bytes": 4 * 2**30}
        return EngineSpec(**fields | changes)

    def _state(self, spec: EngineSpec) -> EngineState:
        return EngineState(self.manager.folder / spec.engine_id)

    def side_by_side(self) -> None:
        """As many engines as GPUs, begun together: devices, equal states, speed of one and of all, a killed host."""
        spec = self._spec(1, capture=True, max_engines=self.num)
        clients = _together([lambda: self.manager.acquire(spec, self.report.log)] * self.num)
        specs = [replace(spec, instance=i) for i in range(self.num)]
        by_folder = {client.folder.name: client for client in clients}
        ordered = [by_folder.get(one.engine_id) for one in specs]
        found = len(by_folder), len(self.manager.starts())
        self.report.check(f"{self.num} runs at once get an engine each", found == (self.num, self.num), found)
        if None in ordered:
            return
        own = [client for client in ordered if client]
        self.report.row("start", f"{self.num} engines, TP=1, together", max(c.waited_s for c in own), "s")
        states = [self._state(one) for one in specs]
        given = sorted(state.read()["gpus"] for state in states)
        self.report.check("each engine has a GPU of its own", given == [[i] for i in range(self.num)], given)
        for state in states:
            leases.check_devices(self.report, state)
        # The first prefill also warms an engine up.
        self._capture(own[0], spec, self.compared, "compared-tp1")
        _together([lambda i=i: self._capture(own[i], spec, self.compared, f"compared-{i}") for i in range(1, self.num)])  # type: ignore[misc]
        self._compare("compared-1", "compared-tp1", "engine 2 against engine 1")
        self.alone_tokens_per_s = self._rate(own[:1], spec, "capture, TP=1, 1 engine")
        if self.num > 1:
            all_rate = self._rate(own, spec, f"capture, TP=1, {self.num} engines")
            efficiency = 100 * all_rate / (self.num * self.alone_tokens_per_s)
            self.report.row("capture", f"scaling efficiency of {self.num} engines", efficiency, "%")
        for client, state in zip(own[1:], states[1:], strict=True):
            client.request("shutdown")
            while state.is_alive():
                time.sleep(0.05)
        leases.kill_and_lease(self.report, self.manager.pool, states[0], self.num)
        for client in own:
            client.close()

    def sharing(self) -> None:
        """One engine on all GPUs, the same without capture, the tiny Kimi, and what these are compared with on one GPU.

        They start at once, since a start is mostly imports and compilation, and work one after the other.
        """
        capture, plain, kimi = self._shared(capture=True), self._shared(), self._shared_kimi()
        alone, kimi_alone = replace(plain, num_gpus=1), replace(kimi, num_gpus=1)
        parts = [
            _Part("capture", capture, f"capture with TP={self.num}", lambda c: self._tensor_parallel(c, capture)),
            _Part("plain", plain, f"plain prefill with TP={self.num}", lambda c: self._plain(c, plain)),
            _Part("kimi", kimi, f"tiny Kimi with TP={self.num}", lambda c: self._kimi(c, kimi)),
            # One pool: each has a GPU of its own.
            _Part("alone", alone, "plain prefill with TP=1", lambda c: self._plain(c, alone)),
            _Part("alone", kimi_alone, "tiny Kimi with TP=1", lambda c: self._kimi(c, kimi_alone)),
        ]
        at_once = len(parts) if self.report.num_gpus else 1
        for first in range(0, len(parts), at_once):
            self._share(parts[first : first + at_once])

    def _share(self, parts: list["_Part"]) -> None:
        # A pool of its own is what lets an engine share GPUs with others.
        managers = {part.pool: EngineManager(self.home / f"pool-{part.pool}", self.num) for part in parts}
        with ExitStack() as stack:

            def start(part: _Part) -> EngineClient:
                client = stack.enter_context(managers[part.pool].acquire(part.spec, self.report.log))
                name = f"{Path(part.spec.model_path).name}, TP={part.spec.num_gpus}"
                self.report.row("start", name + (", capturing" if part.spec.layer_ids else ""), client.waited_s, "s")
                return client

            starts = [
                lambda part=part: self.report.step(f"start: {part.what}", 0, lambda: start(part)) for part in parts
            ]  # type: ignore[misc]
            try:
                for part, client in zip(parts, _together(starts), strict=True):
                    if client:
                        self.report.step(part.what, 0, lambda work=part.work, client=client: work(client))  # type: ignore[misc]
            finally:
                for manager in managers.values():
                    manager.stop_all(self.report.log)

    def _shared(self, capture: bool = False) -> EngineSpec:
        sizes = self.sizes
        return self._spec(
            self.num, capture, gpu_memory_utilization=sizes.shared_utilization, gpu_kvcache_gib=sizes.shared_kvcache_gib
        )

    def _shared_kimi(self) -> EngineSpec:
        hidden = json.loads((self.home / _KIMI / "config.json").read_text())["text_config"]["hidden_size"]
        spec = replace(self._shared(capture=True), model_path=str(self.home / _KIMI), model_id=_KIMI)
        spec = replace(spec, trust_remote_code=True, dtype=self.sizes.kimi_dtype)
        return replace(spec, layer_ids=(2, 3, 7, 8), hidden_size=hidden)

    def _tensor_parallel(self, client: EngineClient, spec: EngineSpec) -> None:
        """Devices, the same states as on one GPU, speed."""
        state = EngineState(self.home / "pool-capture" / self.manager.folder.name / spec.engine_id)
        given = state.read()["gpus"]
        self.report.check(f"TP={self.num} has all GPUs", given == list(range(self.num)), given)
        leases.check_devices(self.report, state)
        self._capture(client, spec, self.compared, "compared-tpn")
        self._compare("compared-tpn", "compared-tp1", f"TP={self.num} against TP=1")
        rate = self._rate([client], spec, f"capture, TP={self.num}")
        if self.alone_tokens_per_s:
            self.report.row("capture", f"TP={self.num} over TP=1", rate / self.alone_tokens_per_s, "x")

    def _plain(self, client: EngineClient, spec: EngineSpec) -> None:
        self._capture(client, spec, self.compared, f"warm-plain-{spec.num_gpus}")
        self._rate([client], spec, f"plain prefill, TP={spec.num_gpus}")

    def _kimi(self, client: EngineClient, spec: EngineSpec) -> None:
        self._capture(client, spec, draw_sequences(self.sizes.num_compared, 48, 256, 9), f"kimi-{spec.num_gpus}")
        if spec.num_gpus == 1 and (self.home / f"kimi-{self.num}" / "states").exists():
            what = f"tiny Kimi: TP={self.num} against TP=1"
            self._compare(f"kimi-{self.num}", "kimi-1", what, spec.layer_ids)

    def _capture(self, client: EngineClient, spec: EngineSpec, sequences: Tokens, name: str) -> None:
        made = prefill(client, spec, sequences, self.home / name)
        if spec.layer_ids:
            self.report.check(
                f"{name}: every sequence is recorded once", not made.faults, made.faults or len(sequences)
            )

    def _compare(self, found: str, expected: str, what: str, layers: tuple[int, ...] = ()) -> None:
        layers = layers or self.sizes.layer_ids
        largest, neighbour = differences(self.home / found, self.home / expected, layers)
        told = {layer: round(value, 5) for layer, value in largest.items()}
        self.report.check(f"{what}: states are equal within bf16", max(largest.values()) < self.sizes.tolerance, told)
        limit = max(self.sizes.neighbour, 3 * max(largest.values()))
        self.report.check(f"{what}: neighbouring layers differ by much more", neighbour > limit, round(neighbour, 4))
        for layer, value in largest.items():
            self.report.row("difference", f"{what}, layer {layer}", 100 * value, "%")

    def _rate(self, clients: list[EngineClient], spec: EngineSpec, what: str) -> float:
        """Tokens/s of all clients together, each with sequences of its own, to sealed shards."""
        folder = self.home / "measured"
        started = time.monotonic()
        work = [
            lambda i=i, client=client: prefill(client, spec, self.measured[i], folder / f"{what}-{i}".replace(" ", "-"))  # type: ignore[misc]
            for i, client in enumerate(clients)
        ]
        made = _together(work)
        wall = time.monotonic() - started
        tokens = sum(one.num_tokens for one in made)
        rate = tokens / max(one.engine_s for one in made)
        self.report.row("prefill", what, rate, "tokens/s")
        if spec.layer_ids:
            self.report.row("prefill", f"{what}, to sealed shards", tokens / wall, "tokens/s")
            sealed = max(one.seal_s for one in made)
            self.report.row("prefill", f"{what}, sealing", sealed, "s")
            self.report.row("prefill", f"{what}, written", sum(one.num_bytes for one in made) / 2**30, "GiB")
            faults = [fault for one in made for fault in one.faults]
            self.report.check(f"{what}: every sequence is recorded once", not faults, faults or len(self.measured[0]))
        for path in folder.glob("*/states/shard-*"):
            path.unlink()
        return rate


def _together(work: list[Callable]) -> list:
    """Results of all, run at the same time."""
    with ThreadPoolExecutor(max(len(work), 1)) as pool:
        return list(pool.map(lambda one: one(), work))
