"""Asks vLLM's registry about an architecture, without a load: `python -m eagle3_pipeline.engine.vllm_registry NAME`.

The class alone tells whether vLLM can hand out the states of its layers (the interface `SupportsEagle3`), which capture
and drafts both need; an engine would find out after the load. vLLM takes seconds to import, so it is asked in a process
of its own, once for every architecture and version.
"""

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_pipeline.engine.corrections import installed_version
from eagle3_pipeline.store import atomic
from eagle3_pipeline.workers import child_environment

_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class RegistryAnswer:
    """What vLLM's registry says of an architecture.

    Attributes:
        version: of vLLM, as "0.32"; empty: it is not installed.
        known: whether there is a class of this name.
        gives_states: whether the class can hand out the states of its layers.
        error: why the class cannot be imported on this machine; empty: it can.
    """

    version: str
    known: bool = False
    gives_states: bool = False
    error: str = ""


def ask_registry(architecture: str, memory: Path) -> RegistryAnswer:
    """The registry's answer, remembered in the folder `memory`."""
    version = installed_version()
    if not version:
        return RegistryAnswer(version)
    remembered = memory / f"{architecture}-{version}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RegistryAnswer(**json.loads(remembered.read_bytes()))
    command = [sys.executable, "-m", "eagle3_pipeline.engine.vllm_registry", architecture]
    environment = child_environment({"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=True)
        answer = RegistryAnswer(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:]
        return RegistryAnswer(version, error=f"vLLM cannot be imported: {''.join(last)}")
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
        return RegistryAnswer(version, error=f"vLLM cannot be asked: {error}")
    if not answer.error:
        # What is missing may be installed later; and a folder that cannot be written costs some seconds.
        with contextlib.suppress(Exception):
            atomic.write_json(remembered, asdict(answer))
    return answer


def _look_up(architecture: str) -> RegistryAnswer:
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    version, registered = installed_version(), ModelRegistry.models.get(architecture)
    if registered is None:
        return RegistryAnswer(version)
    try:
        return RegistryAnswer(version, True, bool(supports_eagle3(registered.load_model_cls())))
    except Exception as error:  # whatever the import of a model's module raises
        return RegistryAnswer(version, True, error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    # vLLM and what it imports write to standard output.
    answers = os.dup(1)
    os.dup2(2, 1)
    os.write(answers, json.dumps(asdict(_look_up(sys.argv[1]))).encode() + b"\n")
