"""Leases of all GPUs and of one, asked for at once; what an engine's processes see; a killed holder."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from eagle3_pipeline.engine.devices import gpu_memory
from eagle3_pipeline.engine.lease import GpuPool
from eagle3_pipeline.engine.state import EngineState
from eagle3_pipeline_tests.benchmarks.multi_gpu.report import Report
from eagle3_pipeline_tests.store.children import Child

_ROUNDS = 5
_FREE_SHARE = 0.97
_VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "VLLM_USE_FLASHINFER_SAMPLER")
_EXPECTED = ("0", "1", "0")
# Arguments: folder, GPUs of the pool, GPUs wanted, rounds.
_TAKE_TURNS = """
    import json, sys, time
    from pathlib import Path
    from eagle3_pipeline.engine.lease import GpuPool
    folder, num_gpus, count, rounds = sys.argv[1], *map(int, sys.argv[2:])
    for _ in range(rounds):
        asked = time.monotonic()
        with GpuPool(Path(folder), num_gpus).acquire(count, f"{count} GPUs", 60.0, lambda _: None) as lease:
            start = time.monotonic()
            time.sleep(0.3)
            end = time.monotonic()
        print(json.dumps({"gpus": lease.gpus, "waited": start - asked, "start": start, "end": end}), flush=True)
        time.sleep(0.3)
"""


def all_against_one(report: Report, folder: Path, pool_gpus: int) -> None:
    """Two processes ask for all GPUs and for one at once, several times: never both, both served in the end."""
    counts = (pool_gpus, 1)
    children = [Child(_TAKE_TURNS, folder, pool_gpus, count, _ROUNDS) for count in counts]
    turns: list[list[dict[str, Any]]] = []
    for child in children:
        with child:
            turns.append([json.loads(child.line()) for _ in range(_ROUNDS)])
            child.finish()
    overlaps = [(a, b) for a in turns[0] for b in turns[1] if a["start"] < b["end"] and b["start"] < a["end"]]
    report.check(f"{pool_gpus} GPUs and 1 GPU are never leased at once", not overlaps, f"{len(overlaps)} overlaps")
    expected = [list(range(count)) for count in counts]
    given = [[turn["gpus"] for turn in own] for own in turns]
    served = all(gpus == want for own, want in zip(given, expected, strict=True) for gpus in own)
    report.check("both who asked are served every time, in index order", served, given)
    report.row("lease", f"longest wait for all {pool_gpus}", max(turn["waited"] for turn in turns[0]), "s")


def check_devices(report: Report, state: EngineState) -> None:
    """An engine's processes see the GPUs that it leased and no others: by their environment, and by NVML."""
    found = state.read()
    gpus = found["gpus"]
    environments = [_environment(pid) for pid in _session(found["pid"]) if pid != found["pid"] and not _has_title(pid)]
    seen = {e["CUDA_VISIBLE_DEVICES"] for e in environments if "CUDA_VISIBLE_DEVICES" in e}
    report.check("CUDA_VISIBLE_DEVICES of its processes", seen == {",".join(map(str, gpus))}, seen)
    workers = [e for e in environments if "CUDA_VISIBLE_DEVICES" in e]
    settings = {tuple(e.get(name) for name in _VARIABLES) for e in workers}
    report.check(f"{', '.join(_VARIABLES)} of its processes", settings == {_EXPECTED}, settings)
    if memory := gpu_memory():
        used = [i for i, gpu in memory.items() if gpu.free_bytes < _FREE_SHARE * gpu.total_bytes]
        report.check("its GPUs are in use", set(gpus) <= set(used), f"used {used}")
        _check_nvml(report, set(_session(found["pid"])), gpus)


def _check_nvml(report: Report, own: set[int], gpus: list[int]) -> None:
    """NVML's process lists; where they hold pids of another namespace, or none, they tell nothing."""
    import pynvml

    pynvml.nvmlInit()
    users: dict[int, set[int]] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        users[index] = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    if not any(users.values()) or not all(map(psutil.pid_exists, set[int]().union(*users.values()))):
        report.log(f"NVML's process lists tell nothing here: {users}")
        return
    found = [index for index, pids in users.items() if pids & own]
    report.check("NVML lists its processes on its GPUs only", found == gpus, users)


def kill_and_lease(report: Report, pool: GpuPool, state: EngineState, count: int) -> None:
    """SIGKILL of an engine's host: the next holder gets the GPUs when its processes are gone and the memory is free."""
    host = state.read()["pid"]
    left = set(_session(host)) - {host}
    os.kill(host, signal.SIGKILL)
    started = time.monotonic()
    with pool.acquire(count, "the next holder", 120.0, report.log) as lease:
        waited = time.monotonic() - started
        alive = [pid for pid in left if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        report.check(f"a killed host's {len(left)} processes are gone when its GPUs are leased", not alive, alive)
        memory = gpu_memory()
        busy = [i for i in lease.gpus if memory and memory[i].free_bytes < _FREE_SHARE * memory[i].total_bytes]
        report.check(f"the memory of GPUs {list(lease.gpus)} is free by then", not busy, f"not free: {busy}")
    report.row("lease", "from SIGKILL of the host to the next lease", waited, "s")


def _session(leader: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == leader:
                found.append(pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def _has_title(pid: int) -> bool:
    """Whether a process of vLLM gave itself a title: that is written over a part of its environment."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()[:1] != [] and psutil.Process(pid).cmdline()[0].startswith("VLLM::")
    return True


def _environment(pid: int) -> dict[str, str]:
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(entry.decode(errors="replace").split("=", 1) for entry in entries if b"=" in entry)
