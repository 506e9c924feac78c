"""Homes with one finished chunk and one to be interrupted; processes of a home are found by their sessions."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
import pytest
import yaml

from eagle3_pipeline.assets import launch
from eagle3_pipeline.config import find_pipeline
from eagle3_pipeline.definitions import build_definitions
from eagle3_pipeline.engine.lease import GpuPool
from eagle3_pipeline.engine.state import EngineState, read_starts
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages import templates
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.verifier_outputs import ChunkOutputs, materialise_outputs
from eagle3_pipeline_tests.fake_engine import FAKE_BACKEND
from eagle3_pipeline_tests.resume import gated
from eagle3_pipeline_tests.store.children import wait_until
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

FIRST, SECOND = "000000", "000001"
OUTPUTS = (ids.SYNTHETIC_GENERATIONS, ids.HIDDEN_STATES)
_VARIABLES = ("EAGLE3_HOME", "EAGLE3_PIPELINES", "DAGSTER_HOME")


def write_pipeline(folder: Path, data: dict[str, Any], prompts: list[str]) -> None:
    """Model, source and pipeline file of a test; they lie beside the homes, which are copied."""
    make_tiny_llama(folder / "model")
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "pipelines").mkdir()
    sections = {"verifier": {"model": str(folder / "model"), "dtype": "float32"}, **data}
    sections["dataset"] = {"path": str(folder / "rows.jsonl"), **data["dataset"]}
    (folder / "pipelines" / f"{gated.PIPELINE}.yaml").write_text(yaml.safe_dump(sections))


def use_home(monkeypatch: pytest.MonkeyPatch, home: Path, pipelines: Path) -> None:
    """Points this process and its children at a home."""
    for name in [name for name in os.environ if name.startswith("EAGLE3_")]:
        monkeypatch.delenv(name)
    for name, value in zip(_VARIABLES, (home, pipelines, home / "dagster_home"), strict=True):
        monkeypatch.setenv(name, str(value))


@dataclass
class Home:
    """A home whose processes are interrupted."""

    path: Path
    sessions: set[int] = field(default_factory=set)

    @property
    def context(self) -> StageContext:
        """The pipeline's stage context."""
        return StageContext(find_pipeline(gated.PIPELINE))

    @property
    def gates(self) -> Path:
        """The folder of gates."""
        return self.path / "gates"

    def close_gate(self, point: str, passing: int = 0) -> None:
        """Holds processes at a point."""
        (self.gates / f"{point}.closed").write_text(str(passing))

    def wait_reached(self, point: str) -> None:
        """Waits until a process is held at a point."""
        wait_until((self.gates / f"{point}.reached").exists, timeout_s=60)

    def open_gates(self) -> None:
        """Lets everybody go on."""
        for path in self.gates.glob("*.closed"):
            path.unlink()

    @contextlib.contextmanager
    def gates_open_once_another_host_starts(self) -> Iterator[None]:
        """Holds the host of a killed step until a rerun starts another one, or has waited a while for this one."""

        def work() -> None:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: self.num_hosts() > 1, timeout_s=3.0)
            self.open_gates()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def num_hosts(self) -> int:
        """Engine hosts, whatever their state folder says."""
        return sum("eagle3_pipeline.engine.host" in process.cmdline() for process in self.processes())

    def start(self, *command: str) -> subprocess.Popen:
        """Runs `python -m command` in a session of its own."""
        with (self.path / "process.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.sessions.add(process.pid)
        return process

    def start_step(self, chunk: str) -> subprocess.Popen:
        """A process that materialises the chunk."""
        return self.start(gated.__name__, chunk)

    def start_run_worker(self, chunk: str) -> subprocess.Popen:
        """A run of the job with the multiprocess executor: this process, and a child of it for the step."""
        tags = json.dumps({"dagster/partition": chunk})
        job = f"{gated.PIPELINE}__generate_and_capture"
        location = "eagle3_pipeline_tests.resume.code_location"
        return self.start("dagster", "job", "execute", "-m", location, "-j", job, "--tags", tags)

    def output(self) -> str:
        """What the started processes printed."""
        return (self.path / "process.log").read_text()

    def host_pid(self) -> int:
        """The engine host that runs now."""
        (state,) = [state for state in self._engines() if state.is_alive()]
        pid = state.read()["pid"]
        self.sessions.add(pid)
        return pid

    def host_phase(self) -> str:
        """What the engine host says that it does; empty before it says anything."""
        return next((state.read().get("phase", "") for state in self._engines()), "")

    def _engines(self) -> list[EngineState]:
        return self.context.engines.engines()

    def num_starts(self) -> int:
        """Loads of the verifier so far."""
        return len(self.context.engines.starts())

    def num_journalled(self) -> int:
        """Finished answers of chunks in work."""
        files = (self.path / "scratch" / ids.SYNTHETIC_GENERATIONS).glob("*/journal.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in files)

    def visible(self, chunk: str) -> list[str]:
        """Stages of the chunk that the pipeline refers to. Everything that readers can see must be whole."""
        context = self.context
        for stage in (ids.DATASET, *OUTPUTS):
            for folder in (context.store.root / "objects" / stage).iterdir():
                if folder.is_dir() and folder.suffix != ".partial":
                    context.store.verify(context.store.require(stage, folder.name))
        assert not (context.store.root / "quarantine").exists()
        return [stage for stage in OUTPUTS if context.references.get(stage, chunk)]

    def published(self, stage: str) -> set[str]:
        """Names of the stage's artifacts, of any chunk."""
        return {path.parent.name for path in (self.path / "store" / "objects" / stage).glob("*/manifest.json")}

    def manifests(self, chunk: str) -> list[bytes]:
        """Manifest files of the chunk's outputs, with the times of their making."""
        return [(self.context.upstream(stage, chunk).folder / "manifest.json").read_bytes() for stage in OUTPUTS]

    def rerun(self, chunk: str) -> ChunkOutputs:
        """Materialises the chunk in this process."""
        return materialise_outputs(self.context, chunk)

    def rerun_job(self, chunk: str) -> dg.ExecuteInProcessResult:
        """Runs the job once more."""
        definitions = build_definitions([find_pipeline(gated.PIPELINE)])
        job = definitions.resolve_job_def(f"{gated.PIPELINE}__generate_and_capture")
        with launch.open_instance() as instance:
            return job.execute_in_process(instance=instance, partition_key=chunk, raise_on_error=False)

    def processes(self) -> list[psutil.Process]:
        """Living processes of this home: of sessions seen so far or in the ledger, or with its path as an argument."""
        self.sessions |= {start["pid"] for start in read_starts(self.path / "engines")}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                ours = os.getsid(process.pid) in self.sessions or str(self.path) in " ".join(process.cmdline())
                if ours and process.status() != psutil.STATUS_ZOMBIE and process.pid != os.getpid():
                    found.append(process)
        return found

    def assert_nothing_left(self, timeout_s: float) -> None:
        """Waits for the idle timeout; then there is no process and no lease."""
        deadline_error = ""
        try:
            wait_until(lambda: not self.processes(), timeout_s)
        except AssertionError:
            deadline_error = ", ".join(f"{p.pid} {p.cmdline()}" for p in self.processes())
        assert not deadline_error, f"left behind: {deadline_error}"
        assert GpuPool(self.path / "devices", 0).holders() == {"cpu-0": None}
        assert (self.path / "devices" / "cpu-0.lock").read_text() == "", "nobody is blamed later"

    def end(self) -> None:
        """Ends what a failed test left."""
        self.open_gates()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


def end_process(pid: int) -> None:
    """SIGKILL, as the kernel's out-of-memory killer does; returns when the process is gone or a zombie."""
    process = psutil.Process(pid)
    os.kill(pid, signal.SIGKILL)

    def is_gone() -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(is_gone)


PROMPTS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
FAKE: dict[str, dict[str, Any]] = {
    "dataset": {"samples_per_chunk": 4},
    "generation": {"max_new_tokens": 6, "max_sequence_tokens": 96},
    # The fake engine's states are not those of any model.
    "capture": {"min_next_token_agreement": 0.0},
    "vocab": {"draft_vocab_size": 64},
    "training": {"batch_tokens": 96},
    # Two requests are in flight at a time: twice max_num_seqs.
    "resources": {"num_gpus": 0, "max_num_seqs": 1, "idle_timeout_s": 2.0},
}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home in which the fake engine finished the first of two chunks, made by Dagster."""
    folder = tmp_path_factory.mktemp("prepared")
    write_pipeline(folder, FAKE, PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        use_home(patch, folder / "home", folder / "pipelines")
        patch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
        spec = find_pipeline(gated.PIPELINE)
        definitions = build_definitions([spec])
        with launch.open_instance() as instance:
            launch.sync_chunks(spec, instance, print)
            runs = [("resolve_verifier", None), *[("prepare_data", chunk) for chunk in (FIRST, SECOND)]]
            for job, chunk in [*runs, ("generate_and_capture", FIRST)]:
                resolved = definitions.resolve_job_def(f"{spec.name}__{job}")
                assert resolved.execute_in_process(instance=instance, partition_key=chunk).success
        StageContext(spec).engines.stop_all(print)
    for name in ("engines", "devices", "scratch"):
        shutil.rmtree(folder / "home" / name)
    yield folder


@pytest.fixture
def home(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A copy of the prepared home, on the fake engine with a core."""
    shutil.copytree(prepared / "home", tmp_path / "home", symlinks=True)
    use_home(monkeypatch, tmp_path / "home", prepared / "pipelines")
    monkeypatch.setenv("EAGLE3_ENGINE_BACKEND", FAKE_BACKEND)
    monkeypatch.setenv("EAGLE3_FAKE_CORE", "1")
    monkeypatch.setenv("EAGLE3_FAKE_GATES", str(tmp_path / "home" / "gates"))
    monkeypatch.setattr(templates, "load_tokenizer", gated.light_tokenizer)
    made = Home(tmp_path / "home")
    made.gates.mkdir()
    yield made
    made.end()
