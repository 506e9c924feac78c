"""What is fresh, missing, stale or pending: a pure function of pipeline files, registry and store."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from tabulate import tabulate

from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.evaluation.prompts import read_prompt_bytes
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.stages.published_draft import read_champion
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.manifest import Manifest, read_manifest
from eagle3_pipeline.store.objects import Artifact, Store


class Status(StrEnum):
    """State of one stage of one chunk."""

    FRESH = "fresh"
    MISSING = "missing"
    STALE = "stale"
    PENDING = "pending"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class PlanRow:
    """One line of a plan.

    Attributes:
        stage: name of the stage.
        chunk: the chunk's key; empty for unpartitioned stages.
        status: its state.
        reason: why it is not fresh.
        linked: whether this pipeline's reference names the artifact; another pipeline, or earlier settings, may have
            made one that it only has to point to.
    """

    stage: str
    chunk: str
    status: Status
    reason: str = ""
    linked: bool = True


@dataclass(frozen=True)
class Plan:
    """All lines, in the order in which they are to be materialised."""

    pipeline: str
    rows: list[PlanRow]

    @property
    def todo(self) -> list[PlanRow]:
        """What is not fresh."""
        return [row for row in self.rows if row.status is not Status.FRESH]

    @property
    def to_run(self) -> list[PlanRow]:
        """What is not fresh, and what is but has yet to be pointed to."""
        return [row for row in self.rows if row.status is not Status.FRESH or not row.linked]

    def count(self) -> dict[str, Counter[str]]:
        """Statuses by stage."""
        counts: dict[str, Counter[str]] = {}
        for row in self.rows:
            counts.setdefault(row.stage, Counter())[row.status.value] += 1
        return counts

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {"pipeline": self.pipeline, "rows": [asdict(row) for row in self.rows]}

    def table(self, tablefmt: str = "simple") -> str:
        """One line per stage: how many of each status, and the first reason."""
        first = {row.stage: row.reason for row in reversed(self.todo)}
        rows = [
            [stage, *(counts[s.value] or "" for s in Status), first.get(stage, "")]
            for stage, counts in self.count().items()
        ]
        return tabulate(rows, ["stage", *(s.value for s in Status), "why"], tablefmt=tablefmt)


class _Planner:
    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._rows: list[PlanRow] = []

    def plan(self) -> Plan:
        context, spec = self._context, self._context.spec
        verifier = context.verifier
        self._check(ids.verifier_identity(spec, verifier), None)
        chunks = [chunk for chunk in context.registry.chunks() if chunk.num_rows]
        contents = [self._chunk(chunk) for chunk in chunks]
        baseline = self._check(ids.baseline_identity(spec, verifier, read_prompt_bytes(spec.evaluation.prompts)), None)
        self._tail(chunks, contents, baseline)
        order = {stage: position for position, stage in enumerate(ids.FORMAT_VERSIONS)}
        return Plan(spec.name, sorted(self._rows, key=lambda row: (order[row.stage], row.chunk)))

    def plan_chunk(self, key: str) -> Plan:
        self._chunk(self._context.registry.chunk(key))
        return Plan(self._context.spec.name, self._rows)

    def _chunk(self, chunk: Chunk) -> tuple[Artifact | None, Artifact | None]:
        """Plans a chunk; returns its generations and states where they are fresh."""
        context, spec, verifier = self._context, self._context.spec, self._context.verifier
        dataset = self._check(ids.dataset_identity(spec, chunk), chunk.key)
        generations = states = None
        if dataset is None:
            self._pending(ids.SYNTHETIC_GENERATIONS, chunk.key, ids.DATASET)
        else:
            identity = ids.generations_identity(spec, verifier, dataset.manifest.content_id)
            generations = self._check(identity, chunk.key)
        if generations is None:
            self._pending(ids.HIDDEN_STATES, chunk.key, ids.SYNTHETIC_GENERATIONS)
        else:
            content = generations.manifest.content_ids["input_ids"]
            states = self._check(ids.hidden_states_identity(context.spec, verifier, content), chunk.key)
        return generations, states

    def _tail(
        self,
        chunks: list[Chunk],
        contents: list[tuple[Artifact | None, Artifact | None]],
        baseline: Artifact | None,
    ) -> None:
        spec, verifier = self._context.spec, self._context.verifier
        generations = {c.key: a for c, (a, _) in zip(chunks, contents, strict=True) if a}
        states = {c.key: a for c, (_, a) in zip(chunks, contents, strict=True) if a}
        vocab = checkpoint = evaluation = None
        if not chunks or len(generations) < len(chunks):
            self._pending(ids.VOCAB_MAP, None, ids.SYNTHETIC_GENERATIONS)
        else:
            counts = {key: a.manifest.content_ids["token_counts"] for key, a in generations.items()}
            vocab = self._check(ids.vocab_identity(spec, verifier, counts), None)
        if vocab is None or len(states) < len(chunks):
            self._pending(ids.DRAFT_CHECKPOINT, None, ids.HIDDEN_STATES if vocab else ids.VOCAB_MAP)
        else:
            sequences = {key: a.manifest.content_id for key, a in generations.items()}
            captured = {key: a.manifest.content_id for key, a in states.items()}
            identity = ids.checkpoint_identity(spec, verifier, vocab.manifest.content_id, sequences, captured)
            checkpoint = self._check(identity, None)
        if checkpoint is None or baseline is None:
            self._pending(ids.DRAFT_EVALUATION, None, ids.BASELINE if checkpoint else ids.DRAFT_CHECKPOINT)
        else:
            contents_of = (checkpoint.manifest.content_id, baseline.manifest.content_id)
            evaluation = self._check(ids.evaluation_identity(spec, *contents_of), None)
        self._publication(evaluation)

    def _publication(self, evaluation: Artifact | None) -> None:
        if evaluation is None:
            self._pending(ids.PUBLISHED_DRAFT, None, ids.DRAFT_EVALUATION)
            return
        champion = read_champion(self._context.references.folder)
        if champion is None:
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.MISSING, "there is no champion yet")
        elif champion.get("considered") != evaluation.manifest.content_id:
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.STALE, "the current draft was not compared with the champion")
        else:
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.FRESH)
        self._rows.append(row)

    def _pending(self, stage: str, chunk: str | None, upstream: str) -> None:
        self._rows.append(PlanRow(stage, chunk or "", Status.PENDING, f"waits for {upstream}"))

    def _check(self, identity: Identity, chunk: str | None) -> Artifact | None:
        """Adds the line of an identity whose inputs are all fresh; returns its artifact if it is too."""
        store = self._context.store
        folder = store.object_folder(identity.stage, identity.fingerprint)
        manifest = read_manifest(folder)
        if manifest is not None and manifest.fingerprint != identity.fingerprint:
            manifest = None
        if manifest is None:
            status, reason = self._why(identity, chunk)
        elif damage := _damage(Artifact(folder, manifest)):
            status, reason = Status.CORRUPT, damage
        else:
            status, reason = Status.FRESH, ""
        reference = self._context.references.get(identity.stage, chunk)
        linked = reference is not None and reference.fingerprint == identity.fingerprint
        self._rows.append(PlanRow(identity.stage, chunk or "", status, reason, linked))
        return Artifact(folder, manifest) if manifest and status is Status.FRESH else None

    def _why(self, identity: Identity, chunk: str | None) -> tuple[Status, str]:
        """Compares with what this pipeline used last; else with what another one made of the same inputs."""
        context = self._context
        reference = context.references.get(identity.stage, chunk)
        previous = (
            read_manifest(context.store.object_folder(identity.stage, reference.fingerprint)) if reference else None
        )
        if previous is None:
            previous = self._siblings.get(identity.stage, {}).get(digest(identity.inputs))
        if previous is None:
            return Status.MISSING, "never materialised"
        changes = list(_changes(previous.spec, identity.spec)) + list(
            _changes(previous.inputs, identity.inputs, "input ")
        )
        return Status.STALE, "; ".join(changes) or f"format version {identity.format_version} of the stage is new"

    @cached_property
    def _siblings(self) -> dict[str, dict[str, Manifest]]:
        return _manifests_by_inputs(self._context.store)


def _manifests_by_inputs(store: Store) -> dict[str, dict[str, Manifest]]:
    found: dict[str, dict[str, Manifest]] = {}
    for path in sorted((store.root / "objects").glob("*/*/manifest.json")):
        manifest = read_manifest(path.parent)
        if manifest and path.parent.suffix != ".partial":
            found.setdefault(manifest.stage, {})[digest(manifest.inputs)] = manifest
    return found


def _damage(artifact: Artifact) -> str:
    for name, entry in artifact.manifest.files.items():
        path = artifact.folder / name
        if not path.exists():
            return f"{name} is missing"
        if path.stat().st_size != entry.size_bytes:
            return f"{name} has {path.stat().st_size:,} bytes, expected {entry.size_bytes:,}"
    return ""


def _changes(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """`key old -> new` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                name = f"{prefix}{key}" if not prefix or prefix.endswith(" ") else f"{prefix}.{key}"
                yield from _changes(old.get(key), new.get(key), name)
    else:
        yield f"{prefix} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."


def plan(context: StageContext) -> Plan:
    """Compares the pipeline's current settings and chunks with the store. Starts nothing, writes nothing.

    Raises:
        ConfigError: the verifier or the evaluation prompts cannot be read.
    """
    return _Planner(context).plan()


def plan_chunk(context: StageContext, key: str) -> Plan:
    """The lines of one chunk; its cost does not grow with the number of chunks' artifacts.

    Raises:
        ConfigError: the verifier cannot be read.
    """
    return _Planner(context).plan_chunk(key)
