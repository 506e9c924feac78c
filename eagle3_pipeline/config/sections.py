"""The sections of a pipeline file."""

import datetime
import zoneinfo
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from eagle3_pipeline.config.cron import cron_problem
from eagle3_pipeline.config.fields import Section, execution, later, locator, semantic


class VerifierSpec(Section):
    """The large model whose answers the draft learns to predict."""

    model: str = locator(..., "Hugging Face id or local folder; ${VAR} is expanded")
    revision: str | None = locator(None, "commit or tag of the Hugging Face id; null: the default branch")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = semantic("auto", "compute type of the verifier")
    trust_remote_code: bool = semantic(False, "run Python code that ships with the model (needed for Kimi's tokenizer)")
    chat_template: str | None = semantic(None, "Jinja text that replaces the tokenizer's chat template")
    stop_tokens: list[str] = semantic([], "tokens besides EOS that end a turn, by their text")
    reasoning_marks: list[str] | None = later(
        None, "texts before and behind an answer's reasoning, e.g. [<think>, </think>]; null: as the template has them"
    )

    @field_validator("reasoning_marks")
    @classmethod
    def _check_marks(cls, marks: list[str] | None) -> list[str] | None:
        if marks is not None and (len(marks) != 2 or not all(mark.strip() for mark in marks)):
            raise ValueError(f"{marks}: expected two texts, the start and the end")
        return marks


class ColumnsSpec(Section):
    """Names of the columns that rows are read from. `a.b` is key b of the object in column a."""

    conversations: str = semantic("conversations", "sharegpt: list of {from, value} turns", min_length=1)
    messages: str = semantic("messages", "messages: list of {role, content} turns", min_length=1)
    prompt: str = semantic("prompt", "prompt_response and prompt: the user's text", min_length=1)
    response: str = semantic("response", "prompt_response: the answer", min_length=1)
    instruction: str = semantic("instruction", "alpaca: the user's text", min_length=1)
    input: str = semantic("input", "alpaca: what the instruction is about; appended to it", min_length=1)
    output: str = semantic("output", "alpaca: the answer", min_length=1)
    system: str = semantic("system", "system prompt, beside every format but messages and sharegpt", min_length=1)
    source: str = semantic("source", "where the row comes from, for filters.sources", min_length=1)
    language: str = semantic("language", "the row's language, for filters.languages", min_length=1)


class FiltersSpec(Section):
    """Which conversations are used; the others are rejected with a reason."""

    languages: list[str] | None = semantic(
        None, "only these, as the language column says, or, where there is none, ISO 639 codes as detected; null: all"
    )
    sources: list[str] | None = semantic(None, "only rows whose source column is one of these; null: all")
    exclude_sources: list[str] = semantic([], "no rows whose source column is one of these")
    min_chars: int = semantic(0, "reject conversations with fewer characters in all turns", ge=0)
    max_chars: int | None = semantic(None, "reject conversations with more characters in all turns; null: any", ge=1)
    max_turns: int | None = semantic(None, "reject conversations with more turns; null: any", ge=1)

    @model_validator(mode="after")
    def _check_lengths(self) -> "FiltersSpec":
        if self.max_chars is not None and self.max_chars < self.min_chars:
            raise ValueError(f"max_chars {self.max_chars} is below min_chars {self.min_chars}")
        if self.languages == [] or self.sources == []:
            raise ValueError("an empty list of languages or sources allows nothing; null allows all")
        return self


class DatasetSpec(Section):
    """Where conversations come from, which are used, and how they are cut into chunks."""

    source: Literal["files", "huggingface"] = locator("files", "where rows come from")
    path: str = locator(..., "glob of JSONL/Parquet files, or a Hugging Face id or folder; ${VAR} is expanded")
    subset: str | None = locator(None, "configuration name of the Hugging Face data set")
    split: str = locator("train", "split of the Hugging Face data set")
    format: Literal["auto", "sharegpt", "messages", "prompt_response", "alpaca", "prompt"] = semantic(
        "auto", "shape of a row; auto: the first of these whose column a row has"
    )
    columns: ColumnsSpec = semantic(ColumnsSpec(), "columns that are named otherwise, e.g. {prompt: question}")
    tool_turns: Literal["reject", "text"] = semantic(
        "reject", "conversations with tool calls; text: calls are kept as the answer's text, results as user turns"
    )
    filters: FiltersSpec = semantic(FiltersSpec(), "which conversations are used")
    decontaminate: bool = semantic(
        True, "reject conversations that hold an evaluation prompt, or 13 words of one in a row"
    )
    reasoning: Literal["auto", "drop"] = later(
        "auto", "reasoning that a turn holds beside its content; auto: given to the chat template, else in its marks"
    )
    samples_per_chunk: int = locator(1000, "rows of a chunk; a chunk is a Dagster partition", ge=1)
    max_samples: int | None = locator(None, "use only this many rows of the source", ge=1)
    min_yield: float = execution(
        0.5, "fail a chunk if a smaller share of its rows is usable; 0: a chunk without any is no failure", ge=0, le=1
    )
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
    chat_template_kwargs: dict[str, Any] = semantic(
        {}, "passed to the chat template; only variables that it uses, e.g. {enable_thinking: false} for Qwen3"
    )
    template_date: datetime.date = later(
        datetime.date(2026, 1, 1), "the date that a chat template which asks for the clock is told"
    )
    min_yield: float = execution(0.5, "fail a chunk if a smaller share of its turns gives a sequence", ge=0, le=1)
    one_pass: Literal["auto", "never"] = execution(
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
        0.1, "largest relative difference of sequences captured once more, alone, by prefill; 0: unchecked", ge=0
    )
    max_teacher_kl: float = execution(
        0.03,
        "largest divergence in nats of the log-probabilities that training learns from, recomputed from captured "
        "states, from those that the engine gives itself; 0: unchecked",
        ge=0,
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
    lr: float = semantic(3e-5, "peak learning rate", gt=0, le=1)
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
    num_threads: int | None = execution(None, "CPU threads; null: all, beside a GPU 4", ge=1)
    attention: Literal["auto", "sdpa", "flex_attention", "eager"] = execution("auto", "auto: sdpa on CPU, flex on CUDA")
    log_every_s: float = execution(10.0, "seconds between progress lines", gt=0)


class EvaluationSpec(Section):
    """How the draft is measured when vLLM serves it."""

    prompts: str = locator("builtin:demo", "JSONL of {category, prompt}, or builtin:demo; ${VAR} is expanded")
    num_speculative_tokens: int = semantic(3, "tokens drafted per step", ge=1, le=64)
    max_new_tokens: int = semantic(64, "longest answer in tokens; a draft proposes after the first", ge=2)
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
    gpu_kvcache_gib: float | None = execution(
        None,
        "KV cache of each GPU; null: what gpu_memory_utilization leaves. vLLM counts memory that others take while it "
        "starts as its own: set this where engines start on one GPU at the same time",
        gt=0,
    )
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

    @field_validator("cron")
    @classmethod
    def _check_cron(cls, text: str) -> str:
        if problem := cron_problem(text):
            raise ValueError(f"{text!r} is no cron expression: {problem}")
        return text

    @field_validator("timezone")
    @classmethod
    def _check_timezone(cls, name: str) -> str:
        if name not in zoneinfo.available_timezones():
            raise ValueError(f"{name!r} is no time zone of this machine, e.g. UTC or Europe/Berlin")
        return name


class AssumptionsSpec(Section):
    """What costs are reckoned from while nothing was measured."""

    hidden_size: int | None = execution(None, "H of a verifier that is not on this machine; else its config's", ge=1)
    prompt_tokens_per_sample: int = execution(
        200, "tokens of a sample besides its answer, which may be as long as generation.max_new_tokens", ge=1
    )
    samples: list[Annotated[int, Field(ge=1)]] = execution(
        [1000, 100_000, 1_000_000], "sizes for which `eagle3 plan` prints the whole cost", min_length=1
    )
    load_s: float | None = execution(None, "time of one load of the verifier", gt=0)
    generation_tokens_per_s: float | None = execution(None, "sampled tokens per second of one engine", gt=0)
    capture_tokens_per_s: float | None = execution(None, "prefilled tokens per second of one engine", gt=0)
    training_tokens_per_s: float | None = execution(None, "trained tokens per second of one GPU", gt=0)
