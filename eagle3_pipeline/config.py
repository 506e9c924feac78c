"""Pipeline files: pydantic models of every section, with semantic and execution keys told apart.

A *semantic* key decides what an artifact contains and is part of its fingerprint. An *execution* key decides only
how the work is done or when it is refused (batch sizes, memory, workers, thresholds): it is recorded, and changing it
makes nothing stale. A *locator* says where an input lies; what is found there enters fingerprints by its content.
"""

import hashlib
import json
import os
import re
import zoneinfo
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle3_pipeline.errors import ConfigError

PACKAGE_PIPELINES = Path(__file__).parent / "pipelines"
DEFAULT_ENABLED = "smollm2_demo"
EXECUTION: dict[str, Any] = {"kind": "execution"}
LOCATOR: dict[str, Any] = {"kind": "locator"}


def project_home() -> Path:
    """Folder of everything mutable: `$EAGLE3_HOME`, else `.eagle3` beside the checkout, else `~/.eagle3`."""
    if home := os.environ.get("EAGLE3_HOME"):
        return Path(home).expanduser().absolute()
    checkout = Path(__file__).parent.parent
    base = checkout if (checkout / "workspace.yaml").exists() else Path.home()
    return (base / ".eagle3").absolute()


def execution(default: Any, description: str, **constraints: Any) -> Any:
    """A field that never enters a fingerprint."""
    return Field(default, description=description, json_schema_extra=EXECUTION, **constraints)


def semantic(default: Any, description: str, **constraints: Any) -> Any:
    """A field that is part of the fingerprint of the stages that read its section."""
    return Field(default, description=description, **constraints)


def locator(default: Any, description: str, **constraints: Any) -> Any:
    """A field that says where an input lies."""
    return Field(default, description=description, json_schema_extra=LOCATOR, **constraints)


class Section(BaseModel):
    """A part of a pipeline file. Unknown keys are errors."""

    # NaN and infinity have no canonical JSON.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """The section's semantic keys, ready for a fingerprint."""
        fields = type(self).model_fields
        return {k: v for k, v in self.model_dump(mode="json").items() if not fields[k].json_schema_extra}


class VerifierSpec(Section):
    """The large model whose answers the draft learns to predict."""

    model: str = locator(..., "Hugging Face id or local folder; ${VAR} is expanded")
    revision: str | None = locator(None, "commit or tag of the Hugging Face id; null: the default branch")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = semantic("auto", "compute type of the verifier")
    trust_remote_code: bool = semantic(False, "run Python code that ships with the model (needed for Kimi's tokenizer)")
    chat_template: str | None = semantic(None, "Jinja text that replaces the tokenizer's chat template")
    stop_tokens: list[str] = semantic([], "tokens besides EOS that end a turn, by their text")


class DatasetSpec(Section):
    """Where conversations come from and how they are cut into chunks."""

    source: Literal["files", "huggingface"] = locator("files", "where rows come from")
    path: str = locator(..., "glob of JSONL/Parquet files, or a Hugging Face id or folder; ${VAR} is expanded")
    subset: str | None = locator(None, "configuration name of the Hugging Face data set")
    split: str = locator("train", "split of the Hugging Face data set")
    format: Literal["auto", "sharegpt", "messages", "prompt"] = semantic("auto", "shape of a row")
    samples_per_chunk: int = locator(1000, "rows of a chunk; a chunk is a Dagster partition", ge=1)
    max_samples: int | None = locator(None, "use only this many rows of the source", ge=1)
    min_yield: float = execution(0.5, "fail a chunk if a smaller share of its rows is usable", ge=0, le=1)
    max_row_bytes: int = semantic(16 * 2**20, "rows longer than this are rejected unread", ge=1)


class GenerationSpec(Section):
    """How training sequences are made from conversations."""

    mode: Literal["regenerate", "passthrough"] = semantic(
        "regenerate", "regenerate: the verifier answers anew; passthrough: the data set's answers are kept"
    )
    temperature: float = semantic(0.0, "0: greedy", ge=0)
    top_p: float = semantic(1.0, "nucleus sampling", gt=0, le=1)
    top_k: int = semantic(0, "0: off", ge=0)
    max_new_tokens: int = semantic(1024, "longest answer in tokens", ge=1)
    max_sequence_tokens: int = semantic(4096, "longest training sequence; longer ones are rejected", ge=8)
    truncated: Literal["keep", "drop"] = semantic("keep", "what happens to answers cut at max_new_tokens")
    chat_template_kwargs: dict[str, Any] = semantic({}, "passed to the chat template, e.g. {thinking: false}")
    min_yield: float = execution(0.5, "fail a chunk if a smaller share of its turns gives a sequence", ge=0, le=1)
    one_pass: Literal["auto", "always", "never"] = execution(
        "auto", "capture hidden states while generating; auto: where sampling from a capturing engine is right"
    )


class CaptureSpec(Section):
    """Which hidden states are captured and how they are stored."""

    aux_layer_ids: list[int] | None = semantic(None, "inputs of these layers (vLLM's ids); null: [2, n//2, n-3]")
    dtype: Literal["bfloat16"] = semantic("bfloat16", "storage type of hidden states")
    max_shard_bytes: int = execution(4 * 2**30, "largest shard file; a longer single sequence gets its own", ge=2**16)
    min_next_token_agreement: float = execution(
        0.99, "smallest share of rows whose last-layer state names the next greedy token; 0: unchecked", ge=0, le=1
    )
    recapture_tolerance: float = execution(
        0.1, "largest relative difference of one sequence captured alone from its batched capture; 0: unchecked", ge=0
    )
    min_layer_variance: float = execution(1e-8, "a layer whose variance over a chunk is lower is rejected", ge=0)


class VocabSpec(Section):
    """The draft's vocabulary."""

    draft_vocab_size: int = semantic(32000, "tokens the draft can propose", ge=2)
    min_coverage: float = execution(0.9, "fail if these tokens cover a smaller share of supervised tokens", ge=0, le=1)


class DraftSpec(Section):
    """Geometry of the draft; unset keys follow the verifier."""

    num_hidden_layers: Literal[1] = semantic(1, "decoder layers; vLLM serves one")
    intermediate_size: int | None = semantic(None, "null: the verifier's")
    num_attention_heads: int | None = semantic(None, "null: the verifier's")
    num_key_value_heads: int | None = semantic(None, "null: the verifier's")
    head_dim: int | None = semantic(None, "null: the verifier's")
    rope_theta: float | None = semantic(None, "null: the verifier's, with its scaling; a number: no scaling")
    rms_norm_eps: float | None = semantic(None, "null: the verifier's")
    max_position_embeddings: int | None = semantic(None, "null: the verifier's")
    sliding_window: int | None = semantic(None, "null: full attention")
    norm_before_residual: bool = semantic(True, "the hidden state is normalised before it becomes the residual")
    norm_before_fc: bool = semantic(False, "RMS norm on the concatenated aux states before fc")


class NoiseSpec(Section):
    """Noise on the aux hidden states."""

    kind: Literal["gaussian", "uniform", "none"] = semantic("gaussian", "noise added to aux states in training")
    scale: float = semantic(0.05, "standard deviation (gaussian) or half width (uniform)", ge=0)


class TrainingSpec(Section):
    """How the draft is trained."""

    epochs: int = semantic(10, "passes over the training sequences", ge=1)
    lr: float = semantic(3e-5, "peak learning rate", gt=0)
    warm_start: str = locator(
        "none", "weights to start from: none, champion, or a checkpoint folder; a draft made so is no other artifact"
    )
    optimizer: Literal["adamw", "muon"] = semantic("adamw", "muon: for 2-D weights, AdamW for the rest")
    weight_decay: float = semantic(0.0, "decoupled weight decay", ge=0)
    scheduler: Literal["cosine", "linear", "constant"] = semantic("cosine", "learning-rate schedule after warm-up")
    warmup_ratio: float = semantic(0.01, "share of steps of linear warm-up", ge=0, lt=1)
    max_grad_norm: float = semantic(1.0, "gradient clipping", gt=0)
    accumulate: int = semantic(1, "packed batches per optimizer step, of all processes together", ge=1)
    batch_tokens: int = semantic(8192, "tokens of a packed batch; the longest sequence must fit", ge=8)
    ttt_steps: int = semantic(3, "training-time-test unroll depth", ge=1)
    ttt_loss_decay: float = semantic(1.0, "weight of TTT step i is decay**i", gt=0)
    noise: NoiseSpec = semantic(NoiseSpec(), "noise on aux hidden states, training only")
    train_lm_head: bool = semantic(True, "false: the draft's lm_head stays the verifier's rows")
    validation_fraction: float = semantic(0.05, "share of conversations, chosen by hash", ge=0, lt=1)
    min_validation_samples: int = semantic(8, "at least this many conversations validate", ge=1)
    patience: int | None = semantic(None, "stop after this many epochs without a better acceptance length", ge=1)
    seed: int = semantic(0, "initialisation, order and noise")
    device: Literal["auto", "cpu", "cuda"] = execution("auto", "where training runs")
    num_processes: int = execution(
        1, "training processes, one GPU each; they share the batches of a step: raise accumulate to match", ge=1
    )
    num_workers: int = execution(0, "data-loader processes of each", ge=0)
    num_threads: int | None = execution(None, "CPU threads; null: all", ge=1)
    attention: Literal["auto", "sdpa", "flex_attention", "eager"] = execution("auto", "auto: sdpa on CPU, flex on CUDA")
    log_every_s: float = execution(10.0, "seconds between progress lines", gt=0)


class EvaluationSpec(Section):
    """How the draft is measured when vLLM serves it."""

    prompts: str = locator("builtin:demo", "JSONL of {category, prompt}, or builtin:demo; ${VAR} is expanded")
    num_speculative_tokens: int = semantic(3, "tokens drafted per step", ge=1)
    max_new_tokens: int = semantic(64, "longest answer in tokens", ge=1)
    batch_size: int = semantic(1, "prompts decoded at once where acceptance is counted", ge=1)
    other_batch_sizes: list[int] = semantic([], "further numbers of prompts decoded at once, for their speed only")
    simulation_tolerance: float = execution(
        0.1, "largest relative difference of served from simulated accepted tokens, beside chance", ge=0
    )
    near_tie_epsilon: float = semantic(
        0.05, "a difference is a near-tie if the top-2 log-probabilities are this close", ge=0
    )


class PublishSpec(Section):
    """When a draft replaces the champion."""

    min_improvement: float = semantic(0.0, "acceptance length by which a challenger must beat the champion", ge=0)
    max_category_drop: float | None = semantic(
        None, "largest loss of acceptance length in any category that a challenger may have; null: any", ge=0
    )


class ResourcesSpec(Section):
    """GPUs, memory and batch sizes of the engine."""

    num_gpus: int | None = execution(None, "GPUs of this machine; null: what is there; 0: one CPU slot", ge=0)
    tensor_parallel_size: int = execution(1, "GPUs that hold one verifier", ge=1)
    max_engines: int = execution(
        1, "equal engines side by side: one more is started while all are at work and GPUs are free", ge=1
    )
    gpu_memory_utilization: float = execution(0.85, "share of GPU memory that vLLM takes", gt=0, le=1)
    cpu_kvcache_gib: float = execution(1.0, "KV cache on a CPU machine", gt=0)
    max_num_batched_tokens: int = execution(8192, "tokens of one engine step", ge=16)
    max_num_seqs: int = execution(256, "sequences of one engine step", ge=1)
    enforce_eager: bool = execution(False, "skip CUDA graphs")
    dummy_load: bool = execution(
        False, "before every load, start the same engine once with random weights: what does not fit shows in minutes"
    )
    idle_timeout_s: float = execution(300.0, "an engine without clients exits after this", gt=0)
    start_timeout_s: float = execution(3600.0, "longest engine start", gt=0)
    lease_timeout_s: float = execution(86400.0, "longest wait for a GPU", gt=0)


class ScheduleSpec(Section):
    """When the draft is retrained by itself, and what is enough for it. Schedules are stopped until switched on."""

    cron: str = execution("30 2 * * *", "when `nightly_retrain` looks, as a cron expression")
    timezone: str = execution("UTC", "time zone of `cron`, e.g. Europe/Berlin")
    min_new_fraction: float = execution(
        0.0, "with new data only, retrain once it is at least this share of all rows; 0: any new row", ge=0, le=1
    )
    min_fresh_fraction: float = execution(
        1.0, "vocabulary and training need at least this share of the chunks; the others are left out", gt=0, le=1
    )

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, name: str) -> str:
        if name not in zoneinfo.available_timezones():
            raise ValueError(f"{name!r} is no time zone of this machine, e.g. UTC or Europe/Berlin")
        return name


class PipelineSpec(Section):
    """One pipeline file. `name` is the file's stem."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$", description="stem of the file")
    verifier: VerifierSpec
    dataset: DatasetSpec
    generation: GenerationSpec = GenerationSpec()
    capture: CaptureSpec = CaptureSpec()
    vocab: VocabSpec = VocabSpec()
    draft: DraftSpec = DraftSpec()
    training: TrainingSpec = TrainingSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    publish: PublishSpec = PublishSpec()
    resources: ResourcesSpec = ResourcesSpec()
    schedule: ScheduleSpec = ScheduleSpec()

    @model_validator(mode="after")
    def _check_combinations(self) -> "PipelineSpec":
        generation, training = self.generation, self.training
        if generation.max_new_tokens >= generation.max_sequence_tokens:
            raise ValueError("generation.max_new_tokens must be below generation.max_sequence_tokens")
        if training.batch_tokens < generation.max_sequence_tokens:
            raise ValueError("training.batch_tokens must be at least generation.max_sequence_tokens")
        if self.capture.aux_layer_ids is not None and len(self.capture.aux_layer_ids) != 3:
            raise ValueError("capture.aux_layer_ids must name three layers (EAGLE-3 concatenates three)")
        return self

    @cached_property
    def semantic_sections(self) -> dict[str, dict[str, Any]]:
        """The semantic keys of every section."""
        return {k: getattr(self, k).semantic() for k in type(self).model_fields if k != "name"}

    def spec_hash(self) -> str:
        """Hash of all semantic keys: the `eagle3/spec_hash` tag of a run."""
        return hashlib.sha256(json.dumps(self.semantic_sections, sort_keys=True).encode()).hexdigest()[:16]


def expand(text: str) -> str:
    """Expands `${VAR}`; `${EAGLE3_HOME}` is always defined.

    Raises:
        ConfigError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "EAGLE3_HOME":
            return str(project_home())
        if name not in os.environ:
            raise ConfigError(f"{text!r} names the environment variable {name}, which is not set")
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", value, text)


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"{path}: {error.error_count()} problem(s)"]
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(file)"
        if item["type"] == "extra_forbidden":
            allowed = _allowed_keys(item["loc"][:-1])
            lines.append(f"  {key}: unknown key; allowed keys: {', '.join(allowed)}")
        else:
            found = "" if item["type"] in ("missing", "value_error") else f"; found {item['input']!r}"
            advice = " (the file's name: rename it)" if key == "name" else ""
            lines.append(f"  {key}: {item['msg']}{found}{advice}")
    return "\n".join(lines)


def _allowed_keys(location: tuple[int | str, ...]) -> list[str]:
    model: Any = PipelineSpec
    for part in location:
        model = model.model_fields[part].annotation
    return [key for key in model.model_fields if key != "name" or model is not PipelineSpec]


def load_pipeline(path: Path) -> PipelineSpec:
    """Reads and validates one pipeline file.

    Raises:
        ConfigError: names the file, each wrong key and what is allowed there.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    if "name" in data:
        raise ConfigError(f"{path}: name: unknown key; a pipeline is named as its file")
    try:
        return PipelineSpec(name=path.stem, **{str(k): v for k, v in data.items()})
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error


def pipeline_files() -> dict[str, Path]:
    """Pipeline files by name: the package's, then each folder of `EAGLE3_PIPELINES` (later ones win)."""
    folders = [PACKAGE_PIPELINES]
    folders += [Path(p).expanduser() for p in os.environ.get("EAGLE3_PIPELINES", "").split(os.pathsep) if p]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"EAGLE3_PIPELINES names {folder}, which is not a folder")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_pipeline(name: str) -> PipelineSpec:
    """Loads the pipeline of this name.

    Raises:
        ConfigError: there is no such pipeline, or its file is wrong.
    """
    files = pipeline_files()
    if name not in files:
        raise ConfigError(f"no pipeline is named {name!r}; there are: {', '.join(sorted(files))}")
    return load_pipeline(files[name])


def enabled_pipelines() -> list[PipelineSpec]:
    """Pipelines named in `EAGLE3_ENABLED` (comma-separated; default: the demo)."""
    names = [n.strip() for n in os.environ.get("EAGLE3_ENABLED", DEFAULT_ENABLED).split(",") if n.strip()]
    return [find_pipeline(name) for name in dict.fromkeys(names)]
