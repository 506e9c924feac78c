"""The chain of the quality benchmark, by the project's own stages: data, drafts of several sizes, serving.

Every draft is a pipeline of its own over the same store, so that chunks and the baseline are computed once.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.smollm2 import GGUF_NAME, convert_apart
from eagle3_pipeline.engine.client import EngineClient
from eagle3_pipeline.errors import DataError, EngineError
from eagle3_pipeline.stages import draft_evaluation
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.baseline import materialise_baseline
from eagle3_pipeline.stages.context import StageContext, StageResult
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.draft_checkpoint import materialise_checkpoint
from eagle3_pipeline.stages.draft_evaluation import materialise_evaluation
from eagle3_pipeline.stages.engines import open_engine
from eagle3_pipeline.stages.verifier_outputs import materialise_outputs
from eagle3_pipeline.stages.vocab_map import materialise_vocab_map
from eagle3_pipeline.store.atomic import write_json
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline_tests.benchmarks.one_gpu.quality_prompts import write_evaluation, write_prompts

FULL, USUAL, SPEED = "full", "usual", "speed"
# Of the time that training may take; the rest is validation and saving.
_STEPS_SHARE = 0.85


@dataclass(frozen=True)
class QualitySizes:
    """All sizes of a run.

    Attributes:
        slices: rows of the data set by name, ascending; the last is all.
        chunk: rows of a chunk.
        per_category: evaluation prompts of a category.
        batches: numbers of prompts decoded at once, beside 1, whose speed is measured.
        sections: of the pipeline file, beside what `Quality.spec` sets.
        most_epochs: no draft is trained for longer, however fast that is.
    """

    slices: dict[str, int]
    chunk: int
    per_category: int
    batches: tuple[int, ...]
    sections: dict[str, dict[str, Any]]
    most_epochs: int


_CAPTURE = {
    # The engine's argmax and that of the stored states round differently in bf16; a wrong layer or a shift gives less
    # than a tenth, other sequences' states differ by more than half.
    "min_next_token_agreement": 0.9,
    "recapture_tolerance": 0.3,
}
ON_GPU = QualitySizes(
    slices={"1k": 1000, "4k": 4000, FULL: 12_500},
    chunk=1000,
    per_category=8,
    batches=(32,),
    sections={
        # Served greedily, so the draft learns the greedy answers.
        "generation": {"temperature": 0.0, "max_new_tokens": 256, "max_sequence_tokens": 768},
        "capture": _CAPTURE,
        "vocab": {"draft_vocab_size": 16_384, "min_coverage": 0.5},
        "training": {"lr": 1e-3, "batch_tokens": 8192},
        "evaluation": {"max_new_tokens": 128, "batch_size": 1},
        # A cache of this size, whatever else is on the GPU: all sequences that are decoded at once fit.
        "resources": {
            "gpu_memory_utilization": 0.35,
            "gpu_kvcache_gib": 24.0,
            "max_num_seqs": 1024,
            "max_num_batched_tokens": 16_384,
        },
    },
    most_epochs=30,
)
ON_CPU = QualitySizes(
    slices={"1k": 20, "4k": 40, FULL: 60},
    chunk=20,
    per_category=1,
    batches=(4,),
    sections={
        "generation": {"temperature": 0.0, "max_new_tokens": 24, "max_sequence_tokens": 512},
        "capture": _CAPTURE,
        "vocab": {"draft_vocab_size": 1024, "min_coverage": 0.3},
        "training": {"lr": 1e-3, "batch_tokens": 512, "min_validation_samples": 4},
        "evaluation": {"max_new_tokens": 12, "batch_size": 1},
        "resources": {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "enforce_eager": True},
    },
    most_epochs=2,
)


@dataclass(frozen=True)
class Draft:
    """A draft of this project: the slice that it learns from and what its training changes."""

    rows: str
    training: dict[str, Any] = field(default_factory=dict)


DRAFTS = {
    FULL: Draft(FULL),
    "1k": Draft("1k"),
    "4k": Draft("4k"),
    "muon": Draft(FULL, {"optimizer": "muon"}),
    "ttt5": Draft(FULL, {"ttt_steps": 5}),
    # Trained for nothing but its speed.
    SPEED: Draft("1k", {"epochs": 1}),
    # Its checkpoint is put there by others.
    USUAL: Draft(FULL),
}


class Quality:
    """All steps but the usual training.

    Args:
        home: models, data, store, leases; kept between calls.
        sizes: of a run.
        num_gpus: the pool of leases; 0: a rehearsal.
        train_s: seconds that training on all data may take.
        epochs: instead, if given.
        training: changes of the recipe.
        log: takes progress lines.
    """

    def __init__(
        self,
        home: Path,
        sizes: QualitySizes,
        num_gpus: int,
        train_s: float,
        epochs: int | None,
        training: dict[str, Any],
        log: Callable[[str], None],
    ) -> None:
        self.home, self.sizes, self.num_gpus, self.log = home, sizes, num_gpus, log
        self._train_s, self._epochs, self._training = train_s, epochs, training
        self.model = home / "models" / "SmolLM2-135M-Instruct"
        self.notes = home / "quality"
        self._prompts, self._held_out = home / "data" / "prompts.jsonl", home / "data" / "evaluation.jsonl"

    def spec(self, name: str, num_tokens: int = 3) -> PipelineSpec:
        """The pipeline of a draft, served with `num_tokens` drafted tokens."""
        draft, sections = DRAFTS[name], self.sizes.sections
        training = {**sections["training"], "epochs": self._noted_epochs(name), **self._training, **draft.training}
        if not self.num_gpus:
            training["device"] = "cpu"
        evaluation = {
            **sections["evaluation"],
            "prompts": str(self._held_out),
            "num_speculative_tokens": num_tokens,
            "other_batch_sizes": list(self.sizes.batches),
        }
        dataset = {
            "path": str(self._prompts),
            "samples_per_chunk": self.sizes.chunk,
            "max_samples": self.sizes.slices[draft.rows],
        }
        own = {"dataset": dataset, "training": training, "evaluation": evaluation}
        verifier = {"model": str(self.model), "dtype": "bfloat16"}
        return PipelineSpec.model_validate({**sections, "name": f"quality_{name}", "verifier": verifier, **own})

    def context(self, name: str, num_tokens: int = 3) -> StageContext:
        """Its context, in the home that all share."""
        made = StageContext(self.spec(name, num_tokens), self.log, self.home, self.num_gpus)
        made.registry.sync(made.spec)
        return made

    def prepare(self, gguf_parts: Path | None) -> None:
        """Makes the verifier and the prompts, where they are missing.

        Raises:
            DataError: the verifier is missing and so are the parts of its GGUF file.
        """
        if not self._prompts.exists():
            write_evaluation(self._held_out, self.sizes.per_category)
            write_prompts(self._prompts, self.sizes.slices[FULL])
        if (self.model / "config.json").exists():
            return
        parts = sorted(path for path in gguf_parts.iterdir() if path.is_file()) if gguf_parts else []
        if not parts:
            raise DataError(f"{self.model} is missing: give the parts of {GGUF_NAME} (--gguf-parts)")
        source = self.model.parent / "gguf"
        source.mkdir(parents=True, exist_ok=True)
        with (source / GGUF_NAME).open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)
        self.log(f"converting {GGUF_NAME}, {(source / GGUF_NAME).stat().st_size:,} bytes")
        convert_apart(source, self.model)
        shutil.rmtree(source)

    def make_data(self) -> None:
        """Answers and states of all chunks, by one engine, and the baseline."""
        context = self.context(FULL)
        chunks = context.all_chunks()
        left = [chunk for chunk in chunks if not self._is_made(context, chunk)]
        self.log(f"{len(left)} of {len(chunks)} chunks are to be made")
        if left:
            # Held until the end: it starts once, and must not retire between two chunks.
            with open_engine(context, context.capturing_engine_spec()), ThreadPoolExecutor(2) as pool:
                # One chunk is checked and published while the next is generated.
                list(pool.map(self._make_chunk, left))
        materialise_baseline(context)
        materialise_vocab_map(context)

    def _make_chunk(self, chunk: str) -> None:
        context = StageContext(self.spec(FULL), self.log, self.home, self.num_gpus)
        materialise_dataset(context, chunk)
        materialise_outputs(context, chunk)

    def _is_made(self, context: StageContext, chunk: str) -> bool:
        made = context.last_manifest(ids.HIDDEN_STATES, chunk)
        return made is not None and materialise_outputs_cached(context, chunk)

    def inputs(self, name: str) -> StageContext:
        """The context of a draft whose chunks, baseline and vocabulary are this pipeline's current ones."""
        context = self.context(name)
        for chunk in context.all_chunks():
            materialise_dataset(context, chunk)
            materialise_outputs(context, chunk)
        materialise_baseline(context)
        materialise_vocab_map(context)
        return context

    def train(self, name: str) -> StageResult:
        """Trains a draft for as many epochs as fit.

        It is then teacher-forced on the sequences that are served, but the draft of all data: its serving does that.
        """
        if name != SPEED:
            self._note_epochs(name)
        context = self.inputs(name)
        made = materialise_checkpoint(context)
        if name not in (SPEED, FULL) and not self._note(f"simulation-{name}").exists():
            baseline = context.upstream(ids.BASELINE)
            content = made.manifest.content_id
            identity = ids.evaluation_identity(context.spec, content, baseline.manifest.content_id)
            trained, untrained = draft_evaluation._simulate(context, identity, made.artifact, baseline)
            write_json(self._note(f"simulation-{name}"), {"trained": trained, "untrained": untrained})
        return made

    def _note(self, name: str) -> Path:
        self.notes.mkdir(parents=True, exist_ok=True)
        return self.notes / f"{name}.json"

    def read_note(self, name: str) -> dict[str, Any]:
        """What a step noted; empty if it did not run."""
        with suppress(FileNotFoundError):
            return json.loads(self._note(name).read_text())
        return {}

    def write_note(self, name: str, values: dict[str, Any]) -> None:
        """Notes what a later step or the table reads."""
        write_json(self._note(name), values)

    def _noted_epochs(self, name: str) -> int:
        rows = FULL if name == USUAL else name
        return self.read_note(f"epochs-{rows}").get("epochs", 1)

    def _note_epochs(self, name: str) -> None:
        """Once: a rerun must ask for the same training. Smaller slices get more epochs; the best one is kept."""
        if self.read_note(f"epochs-{name}"):
            return
        epochs, speed = self._epochs, 0.0
        if epochs is None:
            epochs, speed = self._affordable_epochs()
        rows = self.sizes.slices[DRAFTS[name].rows]
        epochs = round(epochs * math.sqrt(self.sizes.slices[FULL] / rows))
        self.write_note(f"epochs-{name}", {"epochs": epochs, "tokens_per_s": speed})

    def _affordable_epochs(self) -> tuple[int, float]:
        speed = self.train(SPEED).manifest.metrics["tokens_per_s"]
        context = self.context(FULL)
        tokens = sum(self.manifests(context, ids.HIDDEN_STATES, "num_tokens"))
        epochs = math.floor(_STEPS_SHARE * self._train_s * speed / tokens)
        self.log(f"{speed:,.0f} tok/s and {tokens:,.0f} tokens: {epochs} epochs take {self._train_s:.0f} s")
        return min(max(epochs, 1), self.sizes.most_epochs), speed

    def manifests(self, context: StageContext, stage: str, metric: str) -> Iterable[float]:
        """A metric of a stage's chunks."""
        found = (context.last_manifest(stage, chunk) for chunk in context.all_chunks())
        return [made.metrics[metric] for made in found if made and metric in made.metrics]

    def serve(self, name: str, num_tokens: int) -> StageResult:
        """Serves a trained draft and compares with the baseline."""
        context = self.context(name, num_tokens)
        if name == USUAL:
            from eagle3_pipeline_tests.benchmarks.one_gpu.quality_usual import evaluate_served

            return evaluate_served(context)
        return materialise_evaluation(context)

    def served(self, name: str, num_tokens: int) -> tuple[Manifest, Path] | None:
        """What `serve` found, if it ran."""
        context = self.context(name, num_tokens)
        contents = [context.last_manifest(stage) for stage in (ids.DRAFT_CHECKPOINT, ids.BASELINE)]
        if not all(contents):
            return None
        identity = ids.evaluation_identity(context.spec, *(made.content_id for made in contents if made))
        found = context.cached(identity)
        return (found.manifest, found.folder) if found else None

    def retire(self) -> None:
        """Ends engines that nobody uses; one at work for another process stays."""
        context = self.context(FULL)
        for state in context.engines.engines():
            if state.is_alive():
                with suppress(EngineError), EngineClient(state) as client:
                    client.request("retire", idle_s=0.0)


def materialise_outputs_cached(context: StageContext, chunk: str) -> bool:
    """Whether the chunk's sequences and states are there for the current settings."""
    dataset = context.last_manifest(ids.DATASET, chunk)
    if not dataset:
        return False
    made = context.cached(ids.generations_identity(context.spec, context.verifier, dataset.content_id))
    if not made:
        return False
    content = made.manifest.content_ids["input_ids"]
    return context.cached(ids.hidden_states_identity(context.spec, context.verifier, content)) is not None
