"""vLLM behind the host: one `AsyncLLM`, one capture connector."""

import copy
import functools
import math
import os
from typing import Any

from eagle3_pipeline.engine.backend import Answer, CaptureTarget
from eagle3_pipeline.engine.corrections import (
    UNDRAFTED,
    VARIABLE,
    corrections,
    has_latent_attention,
    installed_version,
)
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError
from eagle3_pipeline.workers import avoid_multicast

_FEW_CORES = 4
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "max_tokens", "stop_token_ids", "logprobs", "ignore_eos")


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs` for a spec."""
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "dtype": spec.dtype,
        "load_format": spec.load_format,
        "trust_remote_code": spec.trust_remote_code,
        "skip_tokenizer_init": True,
        # Prompts are text: what a multimodal verifier has besides its language model is not loaded.
        "language_model_only": True,
        "worker_extension_cls": "eagle3_pipeline.engine.vllm_worker.WorkerExtension",
        "max_model_len": spec.max_model_len,
        "max_num_batched_tokens": max(spec.max_num_batched_tokens, spec.max_num_seqs),
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": max(1, spec.num_gpus),
        "enforce_eager": spec.enforce_eager or not spec.num_gpus,
        "enable_prefix_caching": False,
        # First come, first served, but for the single sequence that a chunk waits for while others fill the queue.
        "scheduling_policy": "priority",
        "disable_log_stats": not spec.draft_path,
        "seed": 0,
    }
    if spec.num_gpus:
        arguments["gpu_memory_utilization"] = spec.gpu_memory_utilization
        if spec.gpu_kvcache_gib:
            arguments["kv_cache_memory_bytes"] = round(spec.gpu_kvcache_gib * 2**30)
    if spec.layer_ids:
        arguments |= _capture_arguments(spec)
        # With vLLM's own capture, asynchronous scheduling leaves the last row of a sequence that ends on an accepted
        # draft uncomputed.
        arguments["async_scheduling"] = UNDRAFTED in _corrections(spec)
        if UNDRAFTED in _corrections(spec):
            arguments["scheduler_cls"] = "eagle3_pipeline.engine.vllm_scheduler.CaptureScheduler"
    if not spec.num_gpus and spec.dtype == "float32" and has_latent_attention(spec.model_path):
        # On processors with AMX vLLM would take a kernel for 16-bit weights.
        arguments["attention_backend"] = "CPU_MLA"
    if spec.draft_path:
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": spec.draft_path,
            "num_speculative_tokens": spec.num_speculative_tokens,
        }
    return arguments


def _capture_arguments(spec: EngineSpec) -> dict[str, Any]:
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(spec.layer_ids)}},
        },
        "kv_transfer_config": {
            "kv_connector": "ShardConnector",
            "kv_role": "kv_producer",
            "kv_connector_module_path": "eagle3_pipeline.engine.connector",
            "kv_connector_extra_config": {
                "allow_custom_save_path": True,
                # Where vLLM writes the states of a request that names no path; see the connector.
                "shared_storage_path": "",
                "use_synchronization_lock": False,
                "num_writer_threads": 8,
                "layer_ids": list(spec.layer_ids),
                "hidden_size": spec.hidden_size,
                "max_shard_bytes": spec.max_shard_bytes,
            },
        },
    }


def _corrections(spec: EngineSpec) -> list[str]:
    return corrections(spec.model_path, bool(spec.layer_ids), not spec.num_gpus, installed_version())


def set_environment(spec: EngineSpec) -> None:
    """Variables that vLLM, and `vllm_worker` in its workers, read on import."""
    os.environ[VARIABLE] = ",".join(_corrections(spec))
    # Preflight knows the limit, that of YaRN too, where the config's own number is the one before scaling.
    os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    avoid_multicast()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if spec.layer_ids:
        # With vLLM 0.32 the second model runner captures, too; what `vllm_worker` corrects, and all that was tested, is
        # the first one's capture.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if not spec.num_gpus:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(spec.cpu_kvcache_gib)))
        if (os.cpu_count() or 1) <= _FEW_CORES:
            # It would keep a core or two for its scheduler, and be left with half of them.
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


class VllmBackend:
    """Implements `Backend`."""

    def __init__(self) -> None:
        self._engine: Any = None

    async def start(self, spec: EngineSpec) -> None:
        """Loads the verifier, and the draft if there is one."""
        set_environment(spec)
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = engine_arguments(spec)
        if arguments.get("attention_backend") not in AttentionBackendEnum.__members__:
            arguments.pop("attention_backend", None)
        if "kv_transfer_config" in arguments:
            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: dict[str, Any],
        capture: CaptureTarget | None,
        urgent: bool = False,
    ) -> Answer:
        """One request; vLLM aborts it when the task is cancelled."""
        from vllm.inputs import tokens_input

        parameters = copy.copy(_parameters(_settings(sampling)))
        if capture:
            path = str(capture.folder / capture.sequence_id)
            transfer = {"hidden_states_path": path, "include_output_tokens": capture.include_output}
            parameters.extra_args = {"kv_transfer_params": transfer}
        last, priority = None, -int(urgent)
        prompt = tokens_input(prompt_ids)
        async for output in self._engine.generate(prompt, parameters, request_id, priority=priority):
            last = output
        if last is None or not last.finished:
            raise EngineError(f"request {request_id} ended without an answer")
        completion = last.outputs[0]
        if completion.finish_reason not in ("stop", "length"):
            raise EngineError(f"request {request_id} ended with {completion.finish_reason!r}")
        tokens, k = list(completion.token_ids), sampling.get("logprobs")
        if k is None:
            return Answer(tokens, completion.finish_reason)
        candidates = [_candidates(position, k) for position in completion.logprobs]
        return Answer(
            tokens,
            completion.finish_reason,
            completion.cumulative_logprob,
            [_gap(list(found.values())) for found in candidates],
            [sum(math.exp(value) for value in found.values()) for found in candidates],
            sum(token in found for token, found in zip(tokens, candidates, strict=True)),
            [list(found) for found in candidates],
            [list(found.values()) for found in candidates],
        )

    def failed(self) -> bool:
        """Whether vLLM's core is dead."""
        return self._engine is not None and self._engine.errored

    async def counters(self) -> dict[str, Any]:
        """Counters of speculative decoding from vLLM's metrics registry."""
        from vllm.v1.metrics.reader import Vector, get_metrics_snapshot

        names = {
            "vllm:spec_decode_num_drafts": "num_drafts",
            "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
            "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
        }
        counters: dict[str, Any] = {}
        for metric in get_metrics_snapshot():
            if metric.name in names:
                counters[names[metric.name]] = metric.values if isinstance(metric, Vector) else metric.value
        return counters

    def shutdown(self) -> None:
        """Ends vLLM's processes."""
        if self._engine is not None:
            self._engine.shutdown()


def _settings(sampling: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    found = ((key, sampling.get(key)) for key in _SAMPLING_KEYS)
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in found if value is not None)


@functools.lru_cache(maxsize=64)
def _parameters(settings: tuple[tuple[str, Any], ...]) -> Any:
    """Parameters to copy for each request; making and checking them takes longer than the rest of a request here."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values = {key: list(value) if isinstance(value, tuple) else value for key, value in settings}
    final = RequestOutputKind.FINAL_ONLY
    # vLLM would copy them deeply once more.
    return SamplingParams(**values, detokenize=False, output_kind=final, skip_clone=True)


def _candidates(position: dict[int, Any], k: int) -> dict[int, float]:
    """Log-probabilities of the k most likely tokens; vLLM adds the sampled one if it is not among them."""
    return {token: found.logprob for token, found in position.items() if found.rank <= k}


def _gap(values: list[float]) -> float:
    best = sorted(values, reverse=True)
    return best[0] - best[1] if len(best) > 1 else math.inf
