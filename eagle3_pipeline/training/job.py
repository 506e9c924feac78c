"""What a training worker is asked to do, read from its JSON spec."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import DraftSpec, TrainingSpec

DEFAULT_RESUME_EVERY_S = 300.0


@dataclass(frozen=True)
class ChunkInput:
    """One chunk's files: `sequences.parquet` and the folder of hidden-state shards."""

    chunk: str
    sequences: Path
    hidden_states: Path


@dataclass(frozen=True)
class Job:
    """A worker's spec.

    Attributes:
        kind: "train" or "simulate".
        verifier_path: folder of the verifier.
        verifier_name: what the exported config calls it: speculators opens the draft through this name.
        trust_remote_code: whether Python code in that folder may run.
        aux_layer_ids: ids of the three aux layers, ascending (vLLM's convention).
        chunks: the data.
        vocab_map: safetensors file with `t2d` bool [V] and `d2t` int64 [D] offsets.
        output: train: folder that receives the checkpoint and, while it runs, `resume/`.
        init_from: train: checkpoint folder of a warm start.
        fingerprint: train: a resume state of another fingerprint is ignored.
        resume_every_s: train: seconds between resume states within an epoch.
        checkpoint: simulate: checkpoint folder; None: the draft that training would start from.
        num_steps: simulate: drafted tokens per position.
    """

    kind: str
    verifier_path: Path
    verifier_name: str
    trust_remote_code: bool
    aux_layer_ids: tuple[int, ...]
    draft: DraftSpec
    training: TrainingSpec
    chunks: tuple[ChunkInput, ...]
    vocab_map: Path
    output: Path = Path()
    init_from: Path | None = None
    fingerprint: str = ""
    resume_every_s: float = DEFAULT_RESUME_EVERY_S
    checkpoint: Path | None = None
    num_steps: int = 1

    @classmethod
    def parse(cls, spec: dict[str, Any]) -> "Job":
        """Reads a worker's JSON spec."""
        return cls(
            kind=spec["job"],
            verifier_path=Path(spec["verifier"]["path"]),
            verifier_name=spec["verifier"].get("name") or spec["verifier"]["path"],
            trust_remote_code=spec["verifier"]["trust_remote_code"],
            aux_layer_ids=tuple(spec["aux_layer_ids"]),
            draft=DraftSpec(**spec["draft"]),
            training=TrainingSpec(**spec["training"]),
            chunks=tuple(
                ChunkInput(c["chunk"], Path(c["sequences"]), Path(c["hidden_states"])) for c in spec["chunks"]
            ),
            vocab_map=Path(spec["vocab_map"]),
            output=Path(spec.get("output") or ""),
            init_from=Path(spec["init_from"]) if spec.get("init_from") else None,
            fingerprint=spec.get("fingerprint", ""),
            resume_every_s=float(spec.get("resume_every_s", DEFAULT_RESUME_EVERY_S)),
            checkpoint=Path(spec["checkpoint"]) if spec.get("checkpoint") else None,
            num_steps=int(spec.get("num_steps", 1)),
        )
