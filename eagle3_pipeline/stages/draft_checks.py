"""What training, export and evaluation would refuse by settings and verifier alone: asked before the first load."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from eagle3_pipeline.data.verifier import Verifier
from eagle3_pipeline.engine.preflight import Check
from eagle3_pipeline.errors import ConfigError, Eagle3Error, TrainingError
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.draft_spec import resolved_draft
from eagle3_pipeline.stages.warm_start import WEIGHTS, warm_start_folder
from eagle3_pipeline.store.shards import Geometry
from eagle3_pipeline.verifiers.ask import ask
from eagle3_pipeline.verifiers.tensors import head_tensors, read_header

if TYPE_CHECKING:
    from transformers import LlamaConfig

Found = TypeVar("Found")


def draft_checks(context: StageContext) -> list[Check]:
    """All of them."""
    spec, verifier = context.spec, context.verifier
    checks = attempt("verifier's head", "a known formula", lambda: _describe_head(verifier))[1]
    checks += attempt(
        "verifier's embeddings, norm and output layer", "unquantised", lambda: _describe_tensors(verifier)
    )[1]
    size, limit = spec.vocab.draft_vocab_size, verifier.vocab_size
    wanted, advice = f"{limit:,} at most, the verifier's", "lower vocab.draft_vocab_size"
    checks.append(Check("draft vocabulary", size <= limit, f"{size:,}", wanted, advice))
    layers, found = attempt("geometry of the draft", "complete", lambda: _geometry(context))
    checks += found
    if layers:
        longest, limit = spec.generation.max_sequence_tokens, layers.max_position_embeddings
        advice = "raise draft.max_position_embeddings, or lower generation.max_sequence_tokens"
        checks.append(Check("positions of the draft", limit >= longest, f"{limit:,}", f"{longest:,}", advice))
        checks.append(_check_ranks(layers, spec.resources.tensor_parallel_size if context.engines.num_gpus else 1))
        checks += attempt("weights to start from", "of this geometry", lambda: _warm_start(context, layers))[1]
    return [*checks, *_check_device(context), *_check_held_out(context)]


def attempt(what: str, needed: str, action: Callable[[], Found]) -> tuple[Found | None, list[Check]]:
    """What an action finds, and a line of it; what it refuses is a line as well."""
    try:
        found = action()
    except Eagle3Error as error:
        return None, [Check(what, False, str(error), needed)]
    return found, [Check(what, True, brief(found), needed)]


def brief(found: object) -> str:
    """A finding in a line."""
    if isinstance(found, Verifier):
        return found.path
    if isinstance(found, Geometry):
        return str(list(found.layer_ids))
    if hasattr(found, "intermediate_size"):
        return _describe_geometry(found)  # type: ignore[arg-type]
    return str(found)


def _describe_geometry(layers: "LlamaConfig") -> str:
    narrow = " (narrower than the hidden size)" if layers.intermediate_size < layers.hidden_size else ""
    return (
        f"{layers.num_attention_heads} heads of {layers.head_dim}, {layers.num_key_value_heads} of keys, MLP of "
        f"{layers.intermediate_size:,}{narrow}"
    )


def _describe_head(verifier: Verifier) -> str:
    asked = ask(Path(verifier.path))
    formula = asked.formula
    if formula is None:
        raise ConfigError(
            f"{verifier.architecture}: {asked.formula_source}; drafts would be trained on other logits than the "
            "verifier's: this verifier is not supported"
        )
    parts = [f"{'RMS' if formula.norm == 'rms' else 'layer'} norm with eps {formula.eps:g}"]
    parts += ["gain stored less one"] if formula.gain_offset else []
    parts += [f"logits times {formula.scale:g}"] if formula.scale != 1.0 else []
    parts += [f"logits capped at {formula.softcap:g}"] if formula.softcap else []
    return f"{', '.join(parts)}; {asked.formula_source}"


def _describe_tensors(verifier: Verifier) -> str:
    found = head_tensors(Path(verifier.path))
    names = [one.name for one in (found.embedding, found.norm, found.head) if one]
    return ", ".join(dict.fromkeys(names))


def _geometry(context: StageContext) -> "LlamaConfig":
    from eagle3_pipeline.training.draft_config import build_layer_config, check_aux_layers, read_verifier_config

    verifier = context.verifier
    config = read_verifier_config(Path(verifier.path), context.spec.verifier.trust_remote_code)
    _check_agreement(verifier, config)
    layers = build_layer_config(resolved_draft(context), config)
    check_aux_layers(verifier.geometry(context.spec.capture).layer_ids[:-1], config)
    return layers


def _check_agreement(verifier: Verifier, config: object) -> None:
    """The config that training reads, by code that comes with a model where it may run, names the same sizes."""
    for name, expected in (
        ("num_hidden_layers", verifier.num_layers),
        ("hidden_size", verifier.hidden_size),
        ("vocab_size", verifier.vocab_size),
    ):
        found = getattr(config, name, None)
        if found != expected:
            raise ConfigError(f"the verifier's config class reads {name} {found}, its config.json says {expected}")


def _check_ranks(layers: "LlamaConfig", ranks: int) -> Check:
    """vLLM splits the draft over as many GPUs as the verifier: whole heads, and each head of keys whole or repeated."""
    heads, keys = layers.num_attention_heads, layers.num_key_value_heads
    whole = heads % ranks == 0 and layers.intermediate_size % ranks == 0
    passed = whole and (keys % ranks == 0 or ranks % keys == 0)
    found = f"{heads} heads, {keys} of keys, MLP of {layers.intermediate_size}"
    advice = "change draft.num_attention_heads, draft.num_key_value_heads or draft.intermediate_size"
    return Check("draft over the GPUs of an engine", passed, found, f"multiples of {ranks}", advice)


def _warm_start(context: StageContext, layers: "LlamaConfig") -> str:
    """Header and offsets of the weights to start from, compared with what `load_checkpoint` will ask of them."""
    from eagle3_pipeline.training.draft_config import expected_tensors

    folder = warm_start_folder(context)
    if folder is None:
        return "none"
    path = folder / WEIGHTS
    header, start = read_header(path)
    if "lm_head.weight" not in header:
        raise TrainingError(f"training.warm_start: {path} has no lm_head.weight: it is not a draft checkpoint")
    size = header["lm_head.weight"]["shape"][0]
    num_aux = len(context.verifier.geometry(context.spec.capture).layer_ids) - 1
    expected = expected_tensors(layers, size, num_aux, context.spec.draft.norm_before_fc)
    shapes = {name: list(shape) for name, (_, shape) in expected.items() if name not in ("t2d", "d2t")}
    found = {name: list(tensor["shape"]) for name, tensor in header.items() if name not in ("t2d", "d2t")}
    wrong = sorted(n for n in shapes.keys() | found.keys() if shapes.get(n) != found.get(n))
    if wrong:
        detail = "; ".join(f"{n}: {found.get(n, 'missing')}, expected {shapes.get(n, 'none')}" for n in wrong[:5])
        raise TrainingError(f"training.warm_start: {path} does not fit this draft's geometry: {detail}")
    ids = np.arange(size)
    if "d2t" in header:
        place = start + header["d2t"]["data_offsets"][0]
        ids = ids + np.memmap(path, "<i8", "r", place, tuple(header["d2t"]["shape"]))
    if not size or int(ids.max()) >= context.verifier.vocab_size:
        limit = context.verifier.vocab_size
        raise TrainingError(f"training.warm_start: {path}: its d2t leaves the verifier's vocabulary of {limit:,}")
    return str(folder)


def _check_device(context: StageContext) -> list[Check]:
    training, gpus = context.spec.training, context.engines.num_gpus
    checks = []
    if training.device == "cuda":
        advice = "set training.device to auto, or resources.num_gpus to what this machine has"
        checks.append(Check("training.device", gpus > 0, f"cuda with {gpus} GPUs", "a GPU", advice))
    if training.attention == "flex_attention":
        on_gpu = gpus > 0 and training.device != "cpu"
        advice = "set training.attention to auto"
        checks.append(Check("training.attention", on_gpu, "flex_attention", "a GPU to train on", advice))
    return checks


def _check_held_out(context: StageContext) -> list[Check]:
    most, held_out = context.spec.dataset.max_samples, context.spec.training.min_validation_samples
    if most is None:
        return []
    needed = f"more than training.min_validation_samples, {held_out:,}"
    advice = "raise dataset.max_samples, or lower training.min_validation_samples"
    return [Check("conversations to train on", most > held_out, f"dataset.max_samples {most:,}", needed, advice)]
