"""Fingerprints of all stages: which semantic keys and which inputs each one reads. The planner uses the same."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.registry import Chunk
from eagle3_pipeline.data.template_text import reads_clock
from eagle3_pipeline.data.verifier import Verifier
from eagle3_pipeline.stages.context import Identity
from eagle3_pipeline.store.fingerprint import fingerprint
from eagle3_pipeline.store.manifest import Manifest
from eagle3_pipeline.verifiers.changes import changed_head, changed_width

VERIFIER = "verifier"
DATASET = "dataset"
SYNTHETIC_GENERATIONS = "synthetic_generations"
HIDDEN_STATES = "hidden_states"
VOCAB_MAP = "vocab_map"
BASELINE = "baseline"
DRAFT_CHECKPOINT = "draft_checkpoint"
DRAFT_EVALUATION = "draft_evaluation"
PUBLISHED_DRAFT = "published_draft"

CHUNK_STAGES = (DATASET, SYNTHETIC_GENERATIONS, HIDDEN_STATES)
TAIL_STAGES = (VOCAB_MAP, BASELINE, DRAFT_CHECKPOINT, DRAFT_EVALUATION, PUBLISHED_DRAFT)

# Raised when a stage's code or file format changes what it produces.
FORMAT_VERSIONS = {
    VERIFIER: 1,
    DATASET: 1,
    SYNTHETIC_GENERATIONS: 1,
    HIDDEN_STATES: 1,
    VOCAB_MAP: 1,
    BASELINE: 2,
    DRAFT_CHECKPOINT: 1,
    DRAFT_EVALUATION: 2,
    PUBLISHED_DRAFT: 1,
}
_PASSTHROUGH_KEYS = ("mode", "max_sequence_tokens", "chat_template_kwargs", "template_date")


def semantic_part(spec: PipelineSpec, stage: str, verifier: Verifier | None = None) -> dict[str, Any]:
    """The semantic keys of the pipeline file that `stage` reads; also its Dagster code version.

    Args:
        spec: the pipeline.
        stage: name of the stage.
        verifier: the layer ids that null means for it are null, even where the file writes them out; others ascend.
    """
    part, layers = _PARTS[stage](spec.semantic_sections), sorted(spec.capture.aux_layer_ids or ())
    if verifier and layers and "capture" in part:
        written = None if layers == verifier.default_aux_layer_ids else layers
        part["capture"] = {**part["capture"], "aux_layer_ids": written}
    return part


def _generation_part(sections: dict[str, Any]) -> dict[str, Any]:
    generation = sections["generation"]
    if generation["mode"] == "passthrough":
        return {key: generation[key] for key in _PASSTHROUGH_KEYS if key in generation}
    return generation


def _baseline_part(sections: dict[str, Any]) -> dict[str, Any]:
    rendering = ("chat_template_kwargs", "template_date")
    return {
        "verifier": sections["verifier"],
        **{key: sections["generation"][key] for key in rendering if key in sections["generation"]},
        "capture": sections["capture"],
        "evaluation": {
            key: sections["evaluation"][key] for key in ("max_new_tokens", "batch_size", "other_batch_sizes")
        },
    }


_PARTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    VERIFIER: lambda _: {},
    DATASET: lambda s: {"dataset": s["dataset"]},
    SYNTHETIC_GENERATIONS: lambda s: {"verifier": s["verifier"], "generation": _generation_part(s)},
    HIDDEN_STATES: lambda s: {"dtype": s["verifier"]["dtype"], "capture": s["capture"]},
    VOCAB_MAP: lambda s: {"vocab": s["vocab"]},
    BASELINE: _baseline_part,
    DRAFT_CHECKPOINT: lambda s: {"draft": s["draft"], "training": s["training"]},
    DRAFT_EVALUATION: lambda s: {"evaluation": s["evaluation"]},
    PUBLISHED_DRAFT: lambda s: {"publish": s["publish"]},
}


def code_version(spec: PipelineSpec, stage: str) -> str:
    """Dagster's code version of a stage: format version and hash of its semantic keys."""
    return f"{FORMAT_VERSIONS[stage]}-{fingerprint(stage, FORMAT_VERSIONS[stage], semantic_part(spec, stage), {})[:12]}"


def identify(spec: PipelineSpec, stage: str, inputs: dict[str, Any], verifier: Verifier | None = None) -> Identity:
    """The identity of `stage` for these inputs."""
    part, version = semantic_part(spec, stage, verifier), FORMAT_VERSIONS[stage]
    return Identity(stage, version, part, inputs, fingerprint(stage, version, part, inputs))


def verifier_identity(spec: PipelineSpec, verifier: Verifier) -> Identity:
    """The verifier, by the content of its files."""
    return identify(spec, VERIFIER, {"files": verifier.content_id})


def dataset_identity(spec: PipelineSpec, chunk: Chunk, decontamination: str) -> Identity:
    """The normalised rows of a chunk, without those that `decontamination` (the id of what it looks for) finds."""
    return identify(spec, DATASET, {"rows": chunk.content_id, "decontamination": decontamination})


def generations_identity(
    spec: PipelineSpec, verifier: Verifier, dataset_content: str, chunk: Chunk | None = None
) -> Identity:
    """The training sequences of a chunk; where it repeats prompts of earlier chunks, which of them."""
    inputs: dict[str, Any] = {"verifier": verifier.content_id, "dataset": dataset_content, **_date_told(spec, verifier)}
    if spec.generation.mode == "regenerate":
        inputs |= _length_of_engine(spec, verifier) | _decoding(verifier)
    if spec.generation.mode == "regenerate" and chunk and chunk.repeated_turns_id:
        inputs["repeated_turns"] = chunk.repeated_turns_id
    return identify(spec, SYNTHETIC_GENERATIONS, inputs)


def has_work(spec: PipelineSpec, chunk: Chunk, dataset: Manifest) -> bool:
    """Whether a chunk whose dataset is there has anything to make sequences of."""
    if not dataset.metrics["num_samples"]:
        return False
    return spec.generation.mode != "regenerate" or chunk.has_prompts


def hidden_states_identity(spec: PipelineSpec, verifier: Verifier, input_ids_content: str) -> Identity:
    """The states of a chunk: by verifier, layers and ordered token ids; masks do not enter."""
    layers = list(verifier.geometry(spec.capture).layer_ids)
    inputs = {"verifier": verifier.content_id, "layer_ids": layers, "input_ids": input_ids_content}
    inputs |= _length_of_engine(spec, verifier)
    return identify(spec, HIDDEN_STATES, inputs, verifier)


def vocab_identity(spec: PipelineSpec, verifier: Verifier, token_counts: dict[str, str]) -> Identity:
    """The draft vocabulary over all chunks' token counts."""
    return identify(spec, VOCAB_MAP, {"vocab_size": verifier.vocab_size, "token_counts": token_counts})


def baseline_identity(spec: PipelineSpec, verifier: Verifier, prompts: bytes) -> Identity:
    """The undrafted verifier on the evaluation prompts."""
    layers = list(verifier.geometry(spec.capture).layer_ids)
    prompts_id = hashlib.sha256(prompts).hexdigest()[:32]
    inputs = {"verifier": verifier.content_id, "layer_ids": layers, "prompts": prompts_id, **_date_told(spec, verifier)}
    inputs |= _length_of_engine(spec, verifier) | _decoding(verifier)
    return identify(spec, BASELINE, inputs, verifier)


def _length_of_engine(spec: PipelineSpec, verifier: Verifier) -> dict[str, Any]:
    """What the length of its engines changes in a verifier's arithmetic, where it does.

    Release 0.1.0 gave engines one position more than a limit that equals the longest sequence, and so switched on what
    is off now.
    """
    longest = spec.generation.max_sequence_tokens
    switched = verifier.switched_on(longest)
    was_on = longest in verifier.length_switches.values() and longest < verifier.max_positions
    return {"switched_on": switched} if switched or was_on else {}


def _decoding(verifier: Verifier) -> dict[str, Any]:
    """Release 0.1.0 decoded verifiers with recurrent layers wrongly while it captured."""
    return {"decoding": "proved"} if verifier.has_recurrent_layers else {}


def _date_told(spec: PipelineSpec, verifier: Verifier) -> dict[str, str]:
    """The date in prompts, at its default too, where the template asks for the clock.

    Without it what an earlier release rendered on some day would pass for what is rendered now.
    """
    kwargs = json.dumps(spec.semantic_sections["generation"]["chat_template_kwargs"], sort_keys=True)
    asks = reads_clock(verifier.path, verifier.content_id, spec.verifier.chat_template, kwargs)
    return {"template_date": spec.generation.template_date.isoformat()} if asks else {}


def checkpoint_identity(
    spec: PipelineSpec, verifier: Verifier, vocab: str, sequences: dict[str, str], hidden_states: dict[str, str]
) -> Identity:
    """The draft trained on all chunks."""
    folder = Path(verifier.path)
    width = changed_width(folder) if spec.draft.intermediate_size is None else {}
    inputs = {
        "verifier": verifier.content_id,
        "vocab_map": vocab,
        "synthetic_generations": sequences,
        "hidden_states": hidden_states,
        **changed_head(folder),
        **width,
    }
    return identify(spec, DRAFT_CHECKPOINT, inputs)


def evaluation_identity(spec: PipelineSpec, checkpoint: str, baseline: str) -> Identity:
    """One draft against the baseline."""
    return identify(spec, DRAFT_EVALUATION, {"draft_checkpoint": checkpoint, "baseline": baseline})


def publication_identity(spec: PipelineSpec, evaluation: str) -> Identity:
    """The decision about one evaluation; names no artifact, only what was decided on."""
    return identify(spec, PUBLISHED_DRAFT, {"draft_evaluation": evaluation})
