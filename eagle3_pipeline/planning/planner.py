"""Compares the pipeline's settings and chunks with the store."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.evaluation.prompts import read_prompt_bytes
from eagle3_pipeline.planning.costs import Costs
from eagle3_pipeline.planning.plan import Plan, PlanRow, Status
from eagle3_pipeline.planning.reasons import History, changes, damage
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.champion import read_champion
from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.stages.current import enough_fresh
from eagle3_pipeline.stages.published_draft import published_damage
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.manifest import read_manifest
from eagle3_pipeline.store.objects import Artifact

_ORDER = {stage: position for position, stage in enumerate(ids.FORMAT_VERSIONS)}


class _Made(NamedTuple):
    content_id: str
    token_counts: str


class _Planner:
    def __init__(self, context: StageContext) -> None:
        self._context = context
        self._history = History(context)
        self._costs = Costs(context)
        self._versions = {stage: ids.code_version(context.spec, stage) for stage in ids.FORMAT_VERSIONS}
        self._rows: list[PlanRow] = []
        self._work_ids: dict[str, str] = {}
        self._left_out: tuple[str, ...] = ()

    def plan(self) -> Plan:
        context, spec = self._context, self._context.spec
        self._check(ids.verifier_identity(spec, context.verifier), None)
        generations: dict[str, _Made] = {}
        states: dict[str, str] = {}
        chunks = [c for c in context.registry.chunks_with_work() if self._chunk(c, generations, states)]
        identity = ids.baseline_identity(spec, context.verifier, read_prompt_bytes(spec.evaluation.prompts))
        baseline = self._check(identity, None)
        self._tail(len(chunks), generations, states, baseline, identity.inputs["prompts"])
        if len(states) < len(chunks) and enough_fresh(spec, len(states), len(chunks)):
            self._left_out = tuple(chunk.key for chunk in chunks if chunk.key not in states)
        rows = sorted(self._rows, key=lambda row: (_ORDER[row.stage], row.chunk))
        estimates = self._costs.estimates((row for row in rows if row.status is not Status.FRESH), chunks)
        return Plan(self._context.spec.name, rows, self._work_ids, estimates, self._left_out)

    def _chunk(self, chunk: Chunk, generations: dict[str, _Made], states: dict[str, str]) -> bool:
        """Plans a chunk; adds content ids of its generations and states where they are fresh.

        Returns:
            Whether there is anything to train on, as far as is known.
        """
        spec, verifier, key = self._context.spec, self._context.verifier, chunk.key
        looked_for = self._context.decontamination.content_id
        self._work_ids[key] = self._work_id(ids.CHUNK_STAGES, [chunk.content_id, looked_for])
        dataset = self._check(ids.dataset_identity(spec, chunk, looked_for), chunk)
        made = None
        if dataset is not None and not ids.has_work(spec, chunk, dataset.manifest):
            return False
        if dataset is None:
            self._pending(ids.SYNTHETIC_GENERATIONS, key, f"waits for {ids.DATASET}")
        else:
            made = self._check(ids.generations_identity(spec, verifier, dataset.manifest.content_id, chunk), chunk)
        if made is None:
            self._pending(ids.HIDDEN_STATES, key, f"waits for {ids.SYNTHETIC_GENERATIONS}")
            return True
        parts = made.manifest.content_ids
        generations[key] = _Made(made.manifest.content_id, parts["token_counts"])
        captured = self._check(ids.hidden_states_identity(spec, verifier, parts["input_ids"]), chunk)
        if captured:
            states[key] = captured.manifest.content_id
        return True

    def _tail(
        self,
        num_chunks: int,
        generations: Mapping[str, _Made],
        states: Mapping[str, str],
        baseline: Artifact | None,
        prompts: str,
    ) -> None:
        spec, verifier = self._context.spec, self._context.verifier
        sequences = {key: made.content_id for key, made in generations.items()}
        counts = {key: made.token_counts for key, made in generations.items()}
        self._work_ids[""] = self._work_id(ids.TAIL_STAGES, [sequences, states, prompts])
        vocab = checkpoint = evaluation = None
        if not enough_fresh(spec, len(generations), num_chunks):
            self._pending(ids.VOCAB_MAP, "", _waits(ids.SYNTHETIC_GENERATIONS, len(generations), num_chunks))
        else:
            vocab = self._check(ids.vocab_identity(spec, verifier, counts), None)
        if vocab is None:
            self._pending(ids.DRAFT_CHECKPOINT, "", f"waits for {ids.VOCAB_MAP}")
        elif not enough_fresh(spec, len(states), num_chunks):
            self._pending(ids.DRAFT_CHECKPOINT, "", _waits(ids.HIDDEN_STATES, len(states), num_chunks))
        else:
            trained = {key: sequences[key] for key in states}
            identity = ids.checkpoint_identity(spec, verifier, vocab.manifest.content_id, trained, dict(states))
            checkpoint = self._check(identity, None)
        if checkpoint is None or baseline is None:
            self._pending(ids.DRAFT_EVALUATION, "", f"waits for {ids.BASELINE if checkpoint else ids.DRAFT_CHECKPOINT}")
        else:
            both = (checkpoint.manifest.content_id, baseline.manifest.content_id)
            evaluation = self._check(ids.evaluation_identity(spec, *both), None)
        self._publication(evaluation)

    def _publication(self, evaluation: Artifact | None) -> None:
        if evaluation is None:
            self._pending(ids.PUBLISHED_DRAFT, "", f"waits for {ids.DRAFT_EVALUATION}")
            return
        champion = read_champion(self._context.references.folder)
        if champion is None:
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.MISSING, "there is no champion yet")
        elif champion.considered != evaluation.manifest.content_id:
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.STALE, "the current draft was not compared with the champion")
        elif broken := published_damage(self._context, champion):
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.CORRUPT, broken)
        else:
            row = PlanRow(ids.PUBLISHED_DRAFT, "", Status.FRESH)
        self._rows.append(row)

    def _work_id(self, stages: tuple[str, ...], inputs: Any) -> str:
        return digest([inputs, self._context.verifier.content_id, *(self._versions[stage] for stage in stages)])

    def _pending(self, stage: str, chunk: str, reason: str) -> None:
        self._rows.append(PlanRow(stage, chunk, Status.PENDING, reason))

    def _check(self, identity: Identity, chunk: Chunk | None) -> Artifact | None:
        """Adds the line of an identity whose inputs are all fresh; returns its artifact if it is too."""
        store, key = self._context.store, chunk.key if chunk else None
        reference = self._context.references.get(identity.stage, key)
        folder = store.object_folder(identity.stage, identity.fingerprint)
        manifest = read_manifest(folder)
        if manifest is not None and manifest.fingerprint != identity.fingerprint:
            manifest = None
        status, reason = Status.FRESH, ""
        if manifest is None:
            previous = self._history.previous(identity, reference)
            lost = self._history.lost(identity, reference)
            status = Status.STALE if previous and not lost else Status.MISSING
            reason = lost or (changes(previous, identity) if previous else "never materialised")
        elif reason := damage(Artifact(folder, manifest)):
            status = Status.CORRUPT
        if known := manifest or previous:
            self._costs.measure(identity.stage, chunk.num_rows if chunk else 0, known)
        linked = reference is not None and reference.fingerprint == identity.fingerprint
        self._rows.append(PlanRow(identity.stage, key or "", status, reason, linked, identity.fingerprint))
        return Artifact(folder, manifest) if manifest and status is Status.FRESH else None


def _waits(stage: str, num_fresh: int, num_chunks: int) -> str:
    return f"waits for {stage} of {num_chunks - num_fresh} of {num_chunks} chunks" if num_chunks else "waits for chunks"


def plan(context: StageContext) -> Plan:
    """Compares the pipeline's current settings and chunks with the store. Starts nothing, writes nothing.

    Raises:
        ConfigError: the verifier or the evaluation prompts cannot be read.
    """
    return _Planner(context).plan()
