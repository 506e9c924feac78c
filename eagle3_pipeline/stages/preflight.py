"""Preflight of a pipeline: model, template, devices, memory, disk. Starts nothing, imports neither torch nor vLLM."""

import contextlib

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.verifier import Verifier
from eagle3_pipeline.engine.corrections import UNDRAFTED, corrections
from eagle3_pipeline.engine.devices import gpu_memory
from eagle3_pipeline.engine.preflight import (
    Check,
    check_cpu_memory,
    check_disk,
    check_gpu_fit,
    check_gpus,
    check_pool,
    check_processes,
    check_processor,
    check_registry,
    check_writable,
)
from eagle3_pipeline.engine.spec import VLLM_BACKEND, EngineSpec
from eagle3_pipeline.engine.vllm_registry import ask_registry
from eagle3_pipeline.errors import ConfigError, EngineError
from eagle3_pipeline.stages.context import SCRATCH, StageContext
from eagle3_pipeline.stages.draft_checks import attempt, draft_checks
from eagle3_pipeline.stages.templates import chat_template, prompt_rows


def preflight(context: StageContext, offline: bool = False, dummy_load: bool = False) -> list[Check]:
    """All checks of a pipeline.

    Args:
        context: the pipeline.
        offline: look for the verifier on this machine only, do not fetch it.
        dummy_load: if all other checks pass, start the engine with random weights, too, and stop it.
    """
    spec = context.spec
    verifier, checks = attempt("verifier files", "whole", lambda: context.find_verifier(offline))
    if verifier:
        checks += pipeline_checks(context)
        # Not part of those: chunks do without these prompts, and what needs them is not begun before they fit.
        checks += attempt("evaluation prompts", "fit", lambda: _count_prompts(context))[1]
        layers = attempt("", "", lambda: verifier.geometry(spec.capture))[0]
        engine = context.capturing_engine_spec() if layers else context.engine_spec()
        checks += engine_checks(context, engine, verifier)
        generation = spec.generation
        apart = generation.mode == "regenerate" and generation.one_pass == "never"
        engines = [engine, *([context.engine_spec()] if apart else []), context.timed_engine_spec()]
        checks += [_check_breaker(context, one) for one in engines]
        num_tokens = spec.dataset.samples_per_chunk * spec.generation.max_sequence_tokens
        what = f"the hidden states of a chunk of {spec.dataset.samples_per_chunk:,} longest sequences"
        checks.append(check_disk(context.store.root, num_tokens * engine.geometry.row_bytes, what))
    else:
        num_gpus = spec.resources.tensor_parallel_size if spec.resources.num_gpus != 0 else 0
        checks += check_gpus(num_gpus, gpu_memory(), spec.resources.gpu_memory_utilization) if num_gpus else []
        checks += _writable(context)
    if dummy_load and all(check.passed for check in checks):
        checks.append(_rehearse(context))
    return checks


def pipeline_checks(context: StageContext) -> list[Check]:
    """What a pipeline's settings ask of its verifier, whatever engine is to be started."""
    spec, verifier = context.spec, context.verifier
    checks = attempt("layer ids", "in range", lambda: verifier.geometry(spec.capture))[1]
    checks += attempt("chat template", "renders", lambda: _render(context))[1]
    if checks[-1].passed:
        checks += attempt("end of an answer", "stops the verifier", lambda: _check_end(context))[1]
        checks += attempt("tokenizer", "ids", lambda: chat_template(context).describe_vocabulary())[1]
    checks.append(_check_positions(spec, verifier))
    checks += _check_length(spec, verifier)
    training = spec.training
    checks += check_processes(training.num_processes, training.accumulate, context.engines.num_gpus)
    return [*checks, *draft_checks(context)]


def engine_checks(context: StageContext, engine: EngineSpec, verifier: Verifier) -> list[Check]:
    """Checks of devices, memory and folders for one engine."""
    checks = [*_writable(context), *_vllm_checks(context, engine, verifier)]
    if not engine.num_gpus:
        return [*checks, check_cpu_memory(engine, verifier.weight_bytes)]
    gpus = gpu_memory()
    # While engines or trainings of ours hold devices, memory that is not free now may be when the lease is.
    ours = any(context.engines.pool.holders().values())
    checks.append(check_pool(engine.num_gpus, context.engines.num_gpus))
    checks += check_gpus(engine.num_gpus, gpus, 0.0 if ours else engine.gpu_memory_utilization)
    if len(gpus) >= engine.num_gpus:
        checks.append(check_gpu_fit(engine, verifier.weight_bytes, verifier.kv_bytes_per_token, gpus))
    return checks


def _vllm_checks(context: StageContext, engine: EngineSpec, verifier: Verifier) -> list[Check]:
    """What the installed vLLM and this processor can do; not asked where another backend answers."""
    if engine.backend != VLLM_BACKEND:
        return []
    answer = ask_registry(verifier.architecture, context.home / SCRATCH / "vllm")
    checks = [check_registry(answer, verifier.architecture, bool(engine.layer_ids or engine.draft_path))]
    if engine.layer_ids and checks[0].passed:
        proved = UNDRAFTED in corrections(engine.model_path, True, not engine.num_gpus, answer.version)
        way = "without drafts" if proved else "as vLLM does it, which is slower: nothing faster was proved for it"
        checks.append(Check("way of capturing", True, way, "one that the engine's smoke test proves"))
    if not engine.num_gpus:
        checks.append(check_processor(_processor_flags()))
    return checks


def _processor_flags() -> frozenset[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        return next((frozenset(line.split()) for line in file if line.startswith("flags")), frozenset())
    return frozenset()


def _check_breaker(context: StageContext, engine: EngineSpec) -> Check:
    """A run is not refused because this engine failed before."""
    what, needed = f"earlier starts of {engine.describe()}", "no failure that bars the next one"
    try:
        context.engines.require_startable(engine)
    except EngineError as error:
        refusal = str(error).splitlines()
        return Check(what, False, f"{refusal[0].removesuffix(':')}. {refusal[-1]}", needed)
    return Check(what, True, "none that bars the next one", needed)


def _writable(context: StageContext) -> list[Check]:
    return [check_writable(context.engines.folder), check_writable(context.engines.pool_folder)]


def _count_prompts(context: StageContext) -> str:
    by_category = prompt_rows(context)
    return f"{sum(map(len, by_category.values()))} prompts in {len(by_category)} categories"


def _rehearse(context: StageContext) -> Check:
    what, needed = "a start with random weights", "an engine that answers"
    try:
        context.engines.rehearse(context.capturing_engine_spec(), context.log)
    except EngineError as error:
        advice = "see the log's end above; lower resources.max_num_batched_tokens or gpu_memory_utilization"
        return Check(what, False, str(error), needed, advice)
    return Check(what, True, needed, needed)


def _render(context: StageContext) -> str:
    template = chat_template(context)
    ids = template.encode(template.render([{"role": "user", "content": "Hello"}], generation_prompt=True))
    return f"a prompt of {len(ids)} tokens"


def _check_end(context: StageContext) -> str:
    template = chat_template(context)
    end = template.unstopped_end()
    if not template.answer_end().strip():
        return (
            f"nothing is written behind an answer; the verifier stops at {template.stop_token_ids}, and passthrough "
            "trains on one of these where the next turn begins with it"
        )
    if end is None:
        return f"stop tokens {template.stop_token_ids}"
    raise ConfigError(
        f"the template ends an answer with {end!r}, of which no token is EOS or in verifier.stop_tokens: the verifier "
        "would not stop there but at generation.max_new_tokens; add the token that ends a turn to verifier.stop_tokens"
    )


def _check_length(spec: PipelineSpec, verifier: Verifier) -> list[Check]:
    """What the length of all engines of this pipeline decides, for verifiers that compute otherwise in longer ones."""
    longest = spec.generation.max_sequence_tokens
    length, switched = verifier.engine_length(longest), verifier.switched_on(longest)
    checks = []
    for name, limit in verifier.length_switches.items():
        state = f"{'on' if name in switched else 'off'}: engines of {length:,} tokens, they switch beyond {limit:,}"
        # The draft would copy the verifier's rotary embedding, which training applies by each sequence's own length.
        fits = name not in switched or not name.startswith("long factors") or spec.draft.rope_theta is not None
        needed = "the same where the draft is served (vllm serve --max-model-len)"
        advice = f"give draft.rope_theta, or lower generation.max_sequence_tokens to {limit:,}"
        checks.append(Check(name, fits, state, needed, advice))
    return checks


def _check_positions(spec: PipelineSpec, verifier: Verifier) -> Check:
    longest, limit = spec.generation.max_sequence_tokens, verifier.max_positions
    advice = "lower generation.max_sequence_tokens"
    return Check("positions of the verifier", not limit or limit >= longest, f"{limit:,}", f"{longest:,}", advice)
