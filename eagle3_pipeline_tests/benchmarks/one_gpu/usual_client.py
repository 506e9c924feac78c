"""The usual way to capture: speculators' `generate-offline-data` against `vllm serve`, a file per sample."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np

from eagle3_pipeline_tests.benchmarks.multi_gpu.captures import Tokens

_POLL_S = 1.0


class UsualClient:
    """A server that captures, and its client.

    Args:
        folder: of staged states, data and logs.
        model: the verifier's folder.
        layer_ids: layers to capture.
        arguments: further arguments of `vllm serve`.
    """

    def __init__(self, folder: Path, model: Path, layer_ids: tuple[int, ...], arguments: dict[str, object]) -> None:
        folder.mkdir(parents=True)
        self._folder, self._model = folder, model
        self._port = _free_port()
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(folder / "staged")},
        }
        # What `vllm serve` runs; its command line wants a package of that very name.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--skip-tokenizer-init"]
        command += ["--no-enable-prefix-caching", "--speculative-config", json.dumps(speculative)]
        command += ["--kv-transfer-config", json.dumps(transfer)]
        for name, value in arguments.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self._log = (folder / "server.log").open("w")
        # A group of its own: the server's workers end with it.
        self._server = subprocess.Popen(command, stdout=self._log, stderr=self._log, start_new_session=True)

    def wait_ready(self, timeout_s: float) -> None:
        """Waits for the server.

        Raises:
            RuntimeError: it ended, or is not ready in time.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(_POLL_S)
        raise RuntimeError(f"vllm serve is not ready: {(self._folder / 'server.log').read_text()[-1500:]}")

    def capture(self, name: str, sequences: Tokens, concurrency: int) -> float:
        """Captures the sequences; seconds by the client's own clock, without its start."""
        import datasets

        data, output = self._folder / f"{name}-data", self._folder / f"{name}-states"
        rows = {
            "input_ids": [ids.tolist() for ids in sequences.values()],
            "loss_mask": [np.ones(len(ids), dtype=np.int64).tolist() for ids in sequences.values()],
            "seq_len": [len(ids) for ids in sequences.values()],
        }
        dataset = datasets.Dataset.from_dict(rows)
        dataset.set_format("torch")
        dataset.save_to_disk(str(data))
        command = [sys.executable, "-m", "speculators", "generate-offline-data", "--preprocessed-data", str(data)]
        command += ["--endpoint", f"http://127.0.0.1:{self._port}/v1", "--output", str(output)]
        command += ["--concurrency", str(concurrency), "--fail-on-error"]
        path = self._folder / f"{name}.log"
        with path.open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log)
        found = len(list(output.glob("hs_*.safetensors")))
        if found != len(sequences):
            raise RuntimeError(f"the usual client wrote {found} of {len(sequences)} files")
        elapsed = re.search(r"Timing: ([\d.]+)s elapsed", path.read_text())
        if elapsed is None:
            raise RuntimeError(f"the usual client did not say how long it took: {path.read_text()[-500:]}")
        return float(elapsed.group(1))

    def stop(self) -> None:
        """Ends the server and its workers."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._server.poll() is None:
                os.killpg(self._server.pid, number)
                try:
                    self._server.wait(20)
                except subprocess.TimeoutExpired:
                    continue
        self._log.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
