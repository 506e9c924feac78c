"""What a pipeline will cost at other sizes than today's: reckoned from stated assumptions, nothing is read or run."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tabulate import tabulate

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.verifier import Verifier
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.planning.costs import SEQUENCE_BYTES_PER_TOKEN
from eagle3_pipeline.stages.context import StageContext

_NUM_LOADS = 3
_NUM_AUX_LAYERS = 3
_BF16_BYTES = 2


@dataclass(frozen=True)
class Outlook:
    """Costs of one size; times are of one engine or of one training, `None` where no speed is assumed.

    Attributes:
        num_samples: samples.
        num_tokens: tokens of their sequences.
        hidden_states_bytes: bytes of the states.
        sequences_bytes: bytes of the sequences' tables.
        load_s: one load of the verifier.
        generation_s: sampling the answers; 0 where the data set's own are kept.
        capture_s: prefilling the sequences, where that is a pass of its own.
        training_s: all epochs.
        gpu_hours: three loads (for the chunks, to time the undrafted verifier, to serve the draft), generation or
            capture, and training, times their GPUs.
    """

    num_samples: int
    num_tokens: int
    hidden_states_bytes: int
    sequences_bytes: int
    load_s: float | None
    generation_s: float | None
    capture_s: float | None
    training_s: float | None
    gpu_hours: float | None


def tokens_per_sample(spec: PipelineSpec) -> int:
    """A sample's token budget: what is assumed of its prompt, and the longest answer that may be sampled."""
    return min(
        spec.assumptions.prompt_tokens_per_sample + spec.generation.max_new_tokens,
        spec.generation.max_sequence_tokens,
    )


def row_bytes(spec: PipelineSpec, verifier: Verifier | None) -> tuple[int, int, int]:
    """Bytes of one token's states, and the number of layers and H that they come from.

    Raises:
        ConfigError: the verifier is not on this machine and its size is not stated.
    """
    if verifier:
        geometry = verifier.geometry(spec.capture)
        return geometry.row_bytes, len(geometry.layer_ids), geometry.hidden_size
    if spec.assumptions.hidden_size is None:
        raise ConfigError(
            f"{spec.name}: the verifier is not on this machine; state its size as assumptions.hidden_size, or fetch it"
        )
    layers = len(spec.capture.aux_layer_ids or range(_NUM_AUX_LAYERS)) + 1
    return layers * spec.assumptions.hidden_size * _BF16_BYTES, layers, spec.assumptions.hidden_size


def outlook(spec: PipelineSpec, num_samples: int, num_tokens: int, bytes_per_token: int) -> Outlook:
    """Reckons one size.

    Args:
        spec: the pipeline.
        num_samples: samples.
        num_tokens: tokens of their sequences, prompts included.
        bytes_per_token: bytes of one token's states.
    """
    assumed, training = spec.assumptions, spec.training
    num_sampled = max(0, num_tokens - num_samples * assumed.prompt_tokens_per_sample) if _regenerates(spec) else 0
    generation = _seconds(num_sampled, assumed.generation_tokens_per_s)
    capture = _seconds(num_tokens, assumed.capture_tokens_per_s)
    trained = _seconds(num_tokens * training.epochs, assumed.training_tokens_per_s)
    engine = [*[assumed.load_s] * _NUM_LOADS, generation, *([] if _one_pass(spec) else [capture])]
    return Outlook(
        num_samples,
        num_tokens,
        num_tokens * bytes_per_token,
        num_tokens * SEQUENCE_BYTES_PER_TOKEN,
        assumed.load_s,
        generation,
        capture,
        trained,
        _gpu_hours(engine, trained, spec.resources.tensor_parallel_size),
    )


def _regenerates(spec: PipelineSpec) -> bool:
    return spec.generation.mode == "regenerate"


def _one_pass(spec: PipelineSpec) -> bool:
    return _regenerates(spec) and spec.generation.one_pass != "never"


def _seconds(num_tokens: int, tokens_per_s: float | None) -> float | None:
    if not num_tokens:
        return 0.0
    return num_tokens / tokens_per_s if tokens_per_s else None


def _gpu_hours(engine: Sequence[float | None], training: float | None, num_gpus: int) -> float | None:
    known = [seconds for seconds in engine if seconds is not None]
    if training is None or len(known) < len(engine):
        return None
    # A GPU trains `training_tokens_per_s`: more of them take less time, not fewer GPU-hours.
    return (sum(known) * num_gpus + training) / 3600


def outlook_text(
    context: StageContext, sizes: Sequence[int] = (), tokens_each: int | None = None, as_json: bool = False
) -> str:
    """A table with a column per size, and what it is reckoned from.

    Args:
        context: the pipeline; its verifier is not fetched.
        sizes: numbers of samples; none: those of the pipeline file.
        tokens_each: tokens of a sample; `None`: the token budget.
        as_json: the numbers as JSON instead.

    Raises:
        ConfigError: the verifier's size is not known.
    """
    spec = context.spec
    try:
        verifier = context.find_verifier(offline=True)
    except ConfigError:
        if spec.assumptions.hidden_size is None:
            raise
        verifier = None
    per_token, layers, hidden_size = row_bytes(spec, verifier)
    each = tokens_each or tokens_per_sample(spec)
    found = [outlook(spec, size, size * each, per_token) for size in sizes or spec.assumptions.samples]
    if as_json:
        return json.dumps([asdict(one) for one in found], indent=2)
    assumed, gpus = spec.assumptions, spec.resources.tensor_parallel_size
    one_pass = _one_pass(spec)
    rows = [
        ["tokens", *(f"{o.num_tokens:,}" for o in found)],
        ["hidden states", *(_bytes(o.hidden_states_bytes) for o in found)],
        ["sequences", *(_bytes(o.sequences_bytes) for o in found)],
        [f"load on {gpus} GPUs", *(_time(o.load_s) for o in found)],
        [f"generation{_speed(assumed.generation_tokens_per_s)}", *(_time(o.generation_s) for o in found)],
        [f"capture{_speed(assumed.capture_tokens_per_s)}{' *' * one_pass}", *(_time(o.capture_s) for o in found)],
        [f"training, time of 1 GPU{_speed(assumed.training_tokens_per_s)}", *(_time(o.training_s) for o in found)],
        ["GPU-hours in all", *("?" if o.gpu_hours is None else f"{o.gpu_hours:,.1f}" for o in found)],
    ]
    header = [spec.name, *(f"{o.num_samples:,} samples" for o in found)]
    budget = (
        f"{assumed.prompt_tokens_per_sample:,} of the prompt + generation.max_new_tokens, the most an answer may have"
    )
    notes = [
        "Reckoned, not measured, from the speeds under `assumptions` and",
        f"- {each:,} tokens a sample ({'as given' if tokens_each else budget}), {spec.training.epochs} epochs",
        f"- {per_token:,} B per token with {layers} layers of {hidden_size:,} bf16 values",
    ]
    notes.append(f"- {_NUM_LOADS} loads: for the chunks, to time the undrafted verifier, to serve the draft")
    if one_pass:
        notes.append("* Only where captured apart: states come with the answers, in one pass, and are not in the sum.")
    return "\n".join([tabulate(rows, header, disable_numparse=True), "", *notes])


def _speed(tokens_per_s: float | None) -> str:
    return f" at {tokens_per_s:,.0f} tok/s" if tokens_per_s else ""


def _bytes(num_bytes: int) -> str:
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:,.1f} MB ({num_bytes / 2**20:,.1f} MiB)"
    if num_bytes < 1e12:
        return f"{num_bytes / 1e9:,.1f} GB ({num_bytes / 2**30:,.1f} GiB)"
    return f"{num_bytes / 1e12:,.1f} TB ({num_bytes / 2**40:,.1f} TiB)"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds / 60:,.1f} min" if seconds < 2 * 3600 else f"{seconds / 3600:,.1f} h"
