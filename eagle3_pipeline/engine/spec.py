"""What an engine is: requests with equal specs share one, or up to `max_engines`."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.shards import Geometry

VLLM_BACKEND = "eagle3_pipeline.engine.vllm_backend:VllmBackend"


@dataclass(frozen=True)
class EngineSpec:
    """Model, capture, draft, and how to run them.

    Attributes:
        model_path: verifier folder.
        model_id: content identity of the verifier.
        dtype: compute type.
        trust_remote_code: run the model's own Python code.
        max_model_len: longest sequence in tokens.
        layer_ids: layers to capture, ascending; empty: this engine does not capture.
        hidden_size: H, for the capture.
        max_shard_bytes: largest shard file.
        draft_path: draft folder; empty: no speculative decoding.
        num_speculative_tokens: tokens drafted per step.
        num_gpus: GPUs to lease; 0: the CPU slot.
        max_engines: most engines of this spec at a time.
        instance: number among the engines of this spec; the manager gives it.
        timed: its speed is measured, so it serves nothing else.
        gpu_memory_utilization: share of GPU memory.
        cpu_kvcache_gib: KV cache on a CPU machine.
        gpu_kvcache_gib: KV cache of each GPU; None: what the share of memory leaves.
        max_num_batched_tokens: tokens of one step.
        max_num_seqs: sequences of one step.
        enforce_eager: no CUDA graphs.
        idle_timeout_s: exit after this long without clients.
        start_timeout_s: longest start.
        lease_timeout_s: longest wait for GPUs.
        load_format: vLLM's; `dummy` makes random weights instead of reading files.
        backend: `module:Class` of the backend.
    """

    model_path: str
    model_id: str
    dtype: str
    trust_remote_code: bool
    max_model_len: int
    layer_ids: tuple[int, ...] = ()
    hidden_size: int = 0
    max_shard_bytes: int = 0
    draft_path: str = ""
    num_speculative_tokens: int = 0
    num_gpus: int = 0
    max_engines: int = 1
    instance: int = 0
    timed: bool = False
    gpu_memory_utilization: float = 0.85
    cpu_kvcache_gib: float = 1.0
    gpu_kvcache_gib: float | None = None
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    enforce_eager: bool = False
    idle_timeout_s: float = 300.0
    start_timeout_s: float = 3600.0
    lease_timeout_s: float = 86400.0
    load_format: str = "auto"
    backend: str = VLLM_BACKEND

    @property
    def engine_id(self) -> str:
        """Identity of the spec: names the engine's state folder."""
        return digest(asdict(self))[:16]

    @property
    def load_key(self) -> tuple[str, int, str]:
        """What decides how long a load takes."""
        return self.model_id, self.num_gpus, self.load_format

    @property
    def geometry(self) -> Geometry:
        """Shape of a token's captured states."""
        return Geometry(self.layer_ids, self.hidden_size)

    def describe(self) -> str:
        """One phrase for logs."""
        parts = [Path(self.model_path).name, self.dtype]
        if self.layer_ids:
            parts.append(f"capturing layers {list(self.layer_ids)}")
        if self.load_format == "dummy":
            parts.append("with random weights")
        if self.draft_path:
            parts.append(f"with a draft of {self.num_speculative_tokens} tokens")
        if self.timed:
            parts.append("(timed)")
        if self.instance:
            parts.append(f"(engine {self.instance + 1} of its kind)")
        return " ".join(parts)

    def to_json(self) -> str:
        """The spec as JSON."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "EngineSpec":
        """The inverse of `to_json`."""
        data = json.loads(text)
        return cls(**{**data, "layer_ids": tuple(data["layer_ids"])})


def default_backend() -> str:
    """The backend class; tests of the pipeline around the engine name their own by `EAGLE3_ENGINE_BACKEND`."""
    return os.environ.get("EAGLE3_ENGINE_BACKEND", VLLM_BACKEND)
