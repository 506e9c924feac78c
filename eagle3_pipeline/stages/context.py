"""What every stage gets, and the one way in which stages are cached."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from eagle3_pipeline.config import PipelineSpec, project_home
from eagle3_pipeline.data.decontamination import Decontamination
from eagle3_pipeline.data.registry import ChunkRegistry
from eagle3_pipeline.data.verifier import Verifier, resolve_verifier
from eagle3_pipeline.engine.devices import count_gpus
from eagle3_pipeline.engine.manager import EngineManager
from eagle3_pipeline.engine.spec import EngineSpec, default_backend
from eagle3_pipeline.errors import CorruptArtifactError, StaleInputError
from eagle3_pipeline.evaluation.prompts import load_prompts
from eagle3_pipeline.store.atomic import require_space
from eagle3_pipeline.store.manifest import Manifest, read_manifest
from eagle3_pipeline.store.objects import Artifact, ArtifactWriter, Store
from eagle3_pipeline.store.references import References

Log = Callable[[str], None]
# Beside an artifact's own partial folder lie logs and staged prompts, which are not part of it.
SCRATCH = "scratch"


@dataclass(frozen=True)
class Identity:
    """What a stage is asked for: the ingredients of its fingerprint."""

    stage: str
    format_version: int
    spec: dict[str, Any]
    inputs: dict[str, Any]
    fingerprint: str


@dataclass(frozen=True)
class Produced:
    """What a stage says of the files that it wrote.

    Attributes:
        content_id: identity of what came out.
        metrics: counts and statistics.
        rejected: rejected rows by reason.
        content_ids: of parts of the artifact.
        provenance: facts that influence nothing downstream.
        checksums: of files that need not be read to publish them.
    """

    content_id: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    rejected: dict[str, int] = field(default_factory=dict)
    content_ids: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageResult:
    """A published artifact, and whether this call computed it."""

    artifact: Artifact
    recomputed: bool

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return self.artifact.manifest


class StageContext:
    """A pipeline's spec, store, registry and engines.

    Args:
        spec: the pipeline.
        log: takes progress lines.
        home: `EAGLE3_HOME`; default: `project_home()`.
        num_gpus: GPUs in this machine's pool; default: `resources.num_gpus`, else what the driver reports.
    """

    def __init__(
        self, spec: PipelineSpec, log: Log = print, home: Path | None = None, num_gpus: int | None = None
    ) -> None:
        self.spec = spec
        self.log = log
        self.home = home or project_home()
        root = self.home / "store"
        self.store = Store(root)
        self.references = References(root, spec.name)
        self.registry = ChunkRegistry(root, spec.name)
        num_gpus = spec.resources.num_gpus if num_gpus is None else num_gpus
        self.engines = EngineManager(self.home, count_gpus() if num_gpus is None else num_gpus)

    @cached_property
    def verifier(self) -> Verifier:
        """The verifier on this machine."""
        return resolve_verifier(self.spec.verifier)

    @cached_property
    def decontamination(self) -> Decontamination:
        """Finds this pipeline's evaluation prompts in conversations; none, if that is switched off.

        Raises:
            ConfigError: the prompts cannot be read.
        """
        if not self.spec.dataset.decontaminate:
            return Decontamination([])
        return Decontamination(prompt.user_texts for prompt in load_prompts(self.spec.evaluation.prompts))

    def find_verifier(self, offline: bool) -> Verifier:
        """The verifier; `offline`: only if it need not be fetched."""
        if offline and "verifier" not in self.__dict__:
            self.__dict__["verifier"] = resolve_verifier(self.spec.verifier, offline=True)
        return self.verifier

    def engine_spec(self, **changes: Any) -> EngineSpec:
        """The engine that this pipeline's resources describe, without capture and draft unless `changes` add them."""
        resources, verifier = self.spec.resources, self.verifier
        fields: dict[str, Any] = {
            "model_path": verifier.path,
            "model_id": verifier.content_id,
            "dtype": self.spec.verifier.dtype,
            "trust_remote_code": self.spec.verifier.trust_remote_code,
            "max_model_len": verifier.engine_length(self.spec.generation.max_sequence_tokens),
            "num_gpus": resources.tensor_parallel_size if self.engines.num_gpus else 0,
            "backend": default_backend(),
        }
        shared = set(EngineSpec.__dataclass_fields__) & set(type(resources).model_fields) - {"num_gpus"}
        return EngineSpec(**{**fields, **{name: getattr(resources, name) for name in shared}, **changes})

    def capturing_engine_spec(self) -> EngineSpec:
        """The engine that generates and captures."""
        geometry = self.verifier.geometry(self.spec.capture)
        return self.engine_spec(
            layer_ids=geometry.layer_ids,
            hidden_size=geometry.hidden_size,
            max_shard_bytes=self.spec.capture.max_shard_bytes,
        )

    def timed_engine_spec(self, **changes: Any) -> EngineSpec:
        """An engine that answers the evaluation prompts and nothing beside them."""
        return self.engine_spec(timed=True, max_engines=1, **changes)

    def require_capture_space(self, folder: Path, num_tokens: int) -> None:
        """Refuses a capture of `num_tokens` (at most) that the volume of `folder` cannot hold.

        Raises:
            DiskSpaceError: with both numbers.
        """
        row_bytes = self.verifier.geometry(self.spec.capture).row_bytes
        require_space(folder, num_tokens * row_bytes, f"hidden states of {num_tokens:,} tokens at {row_bytes:,} bytes")

    def last_manifest(self, stage: str, chunk: str | None = None) -> Manifest | None:
        """Manifest of what this pipeline last materialised for (stage, chunk), its files unchecked."""
        reference = self.references.get(stage, chunk)
        return read_manifest(self.store.object_folder(stage, reference.fingerprint)) if reference else None

    def upstream(self, stage: str, chunk: str | None = None) -> Artifact:
        """The artifact that this pipeline last materialised for (stage, chunk).

        Raises:
            StaleInputError: it was never materialised, or is gone.
        """
        reference = self.references.get(stage, chunk)
        artifact = self.store.get(stage, reference.fingerprint) if reference else None
        if artifact is None:
            where = f"{stage}[{chunk}]" if chunk else stage
            raise StaleInputError(f"{self.spec.name}: {where} is not materialised; materialise it first")
        return artifact

    def all_chunks(self) -> list[str]:
        """Keys of all chunks that hold rows which no earlier chunk holds.

        Raises:
            StaleInputError: there is none.
        """
        keys = [chunk.key for chunk in self.registry.chunks_with_work()]
        if not keys:
            raise StaleInputError(f"{self.spec.name} has no chunks; run eagle3 sync-chunks {self.spec.name}")
        return keys

    def cached(self, identity: Identity) -> Artifact | None:
        """The artifact of this identity; a damaged one is quarantined and counts as missing."""
        try:
            return self.store.get(identity.stage, identity.fingerprint)
        except CorruptArtifactError as error:
            self.log(str(error))
            return None

    def materialise(
        self, identity: Identity, chunk: str | None, produce: Callable[[ArtifactWriter], Produced]
    ) -> StageResult:
        """Returns the artifact of this identity, producing it if it is missing, and points the pipeline at it."""
        artifact = self.cached(identity)
        recomputed = artifact is None
        if artifact is None:
            with self.store.write(identity.stage, identity.fingerprint, wait=True, on_wait=self.log) as writer:
                artifact = self.cached(identity)
                if artifact is None:
                    artifact = self.publish(writer, identity, produce(writer))
        self.references.set(identity.stage, chunk, artifact.manifest)
        return StageResult(artifact, recomputed)

    def publish(self, writer: ArtifactWriter, identity: Identity, produced: Produced) -> Artifact:
        """Publishes what `writer` holds."""
        manifest = Manifest(
            stage=identity.stage,
            fingerprint=identity.fingerprint,
            content_id=produced.content_id,
            spec=identity.spec,
            execution=self.spec.resources.model_dump(mode="json"),
            inputs=identity.inputs,
            content_ids=produced.content_ids,
            metrics=dict(produced.metrics),
            rejected=produced.rejected,
            provenance=produced.provenance,
        )
        return writer.publish(manifest, produced.checksums)

    def keep_rejected(self, identity: Identity, rejected: pa.Table) -> Path:
        """Keeps the rejections of a chunk that is not published for them; returns the file."""
        path = self.scratch(identity) / "rejected.parquet"
        pq.write_table(rejected, path)
        return path

    def scratch(self, identity: Identity) -> Path:
        """A folder for logs and staged files of one stage run; it survives a crash and is no part of the artifact."""
        folder = self.home / SCRATCH / identity.stage / identity.fingerprint
        folder.mkdir(parents=True, exist_ok=True)
        return folder
