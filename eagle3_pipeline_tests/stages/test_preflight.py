"""Preflight: each line says what, found, needed, what to do; a load that cannot succeed is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.data.verifier import resolve_verifier
from eagle3_pipeline.engine.breaker import record_failure, reset_failures
from eagle3_pipeline.engine.devices import GpuMemory
from eagle3_pipeline.engine.preflight import (
    GIB,
    check_cpu_memory,
    check_disk,
    check_gpu_fit,
    check_gpus,
    check_pool,
    check_processes,
)
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.errors import EngineError, PreflightError
from eagle3_pipeline.stages.context import StageContext
from eagle3_pipeline.stages.engines import open_engine
from eagle3_pipeline.stages.preflight import preflight
from eagle3_pipeline_tests.tiny_model import make_tiny_llama

H200 = GpuMemory(141 * GIB, 140 * GIB)


def engine(**changes: object) -> EngineSpec:
    fields: dict = {
        "model_path": "m",
        "model_id": "m",
        "dtype": "auto",
        "trust_remote_code": False,
        "max_model_len": 8192,
    }
    return EngineSpec(**{**fields, "num_gpus": 8, "gpu_memory_utilization": 0.85, **changes})


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    make_tiny_llama(tmp_path / "tiny")
    (tmp_path / "prompts.jsonl").write_text('{"category": "a", "prompt": "hi"}\n')
    spec = PipelineSpec.model_validate(
        {
            "name": "p",
            "verifier": {"model": str(tmp_path / "tiny")},
            "dataset": {"path": "none", "samples_per_chunk": 10},
            "generation": {"max_new_tokens": 8, "max_sequence_tokens": 64},
            "vocab": {"draft_vocab_size": 320},
            "evaluation": {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 8},
            "resources": {"num_gpus": 0},
        }
    )
    return StageContext(spec, log=lambda _line: None, home=tmp_path / "home")


def test_a_machine_that_fits_passes_every_line(context: StageContext) -> None:
    assert [check.line() for check in preflight(context) if not check.passed] == []


def test_an_engine_that_is_not_started_again_is_told(context: StageContext) -> None:
    """In the words with which a run is refused, until it is reset; settings that ask for another engine pass."""
    folder = context.engines.folder / context.timed_engine_spec().engine_id
    folder.mkdir(parents=True)
    record_failure(folder, "out of memory; the log's end:\n  | Traceback", deterministic=True, host="1-1")
    with pytest.raises(EngineError) as refused:
        context.engines.require_startable(context.timed_engine_spec())
    first, *_, last = str(refused.value).splitlines()
    (failed,) = [check.line() for check in preflight(context) if not check.passed]
    assert failed.startswith(f"FAIL  earlier starts of tiny auto (timed): found {first[:-1]}. {last}, needed ")
    assert "it failed before: out of memory" in failed and "run eagle3 engine reset" in failed
    assert "Traceback" not in failed, "that is for the run that is refused"
    resources = context.spec.resources.model_copy(update={"max_num_seqs": 3})
    changed = StageContext(context.spec.model_copy(update={"resources": resources}), home=context.home)
    assert [check.line() for check in preflight(changed) if not check.passed] == []
    assert reset_failures(folder)
    assert [check.line() for check in preflight(context) if not check.passed] == []


@pytest.mark.parametrize(("one_pass", "barred"), [("never", 1), ("auto", 0)])
def test_an_engine_that_only_answers_counts_where_a_chunk_asks_for_it(
    context: StageContext, one_pass: str, barred: int
) -> None:
    generation = context.spec.generation.model_copy(update={"one_pass": one_pass})
    context = StageContext(context.spec.model_copy(update={"generation": generation}), home=context.home)
    folder = context.engines.folder / context.engine_spec().engine_id
    folder.mkdir(parents=True)
    record_failure(folder, "out of memory", deterministic=True, host="1-1")
    assert sum(not check.passed for check in preflight(context)) == barred


def test_an_answer_whose_end_does_not_stop_the_verifier_is_told_before_the_load(context: StageContext) -> None:
    folder = Path(context.spec.verifier.model)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token": "<|im_end|>"', '"eos_token": "<|endoftext|>"'))
    (folder / "generation_config.json").unlink(missing_ok=True)
    (failed,) = [check.line() for check in preflight(context) if not check.passed]
    assert failed.startswith("FAIL  end of an answer") and "verifier.stop_tokens" in failed
    # vLLM takes what ends an answer from here as well.
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert [check.line() for check in preflight(context) if not check.passed] == []


def test_missing_gpus_are_counted() -> None:
    (check,) = check_gpus(8, {}, 0.85)
    assert not check.passed
    assert check.line().startswith("FAIL  GPUs: found 0, needed 8: lower resources.tensor_parallel_size")
    assert [c.passed for c in check_gpus(2, dict.fromkeys(range(3), H200), 0.85)] == [True, True, True]


def test_memory_that_somebody_else_holds_is_named_by_gpu() -> None:
    busy = GpuMemory(141 * GIB, 100 * GIB)
    lines = [check.line() for check in check_gpus(2, {0: H200, 1: busy}, 0.85) if not check.passed]
    # 0.85 x 141 GiB = 119.85 GiB are needed.
    assert len(lines) == 1
    assert "free memory of GPU 1: found 100.0 GiB, needed 119.8 GiB" in lines[0]


def test_kimi_fits_eight_h200_and_not_four() -> None:
    """547 GB / 8 = 63.7 GiB of weights a GPU; 120 GiB for vLLM; four GPUs would need 127.4 GiB each."""
    spec = engine(layer_ids=(2, 30, 58, 61), hidden_size=7168)
    kv = 2 * (512 + 64) * 61
    assert check_gpu_fit(spec, 547 * 10**9, kv, dict.fromkeys(range(8), H200)).passed
    four = check_gpu_fit(engine(num_gpus=4), 547 * 10**9, kv, dict.fromkeys(range(4), H200))
    assert not four.passed
    assert "weights 127.4 GiB" in four.needed


def test_the_capture_cache_counts() -> None:
    """57,344 bytes a token and 8,192 tokens are 0.44 GiB; at 2,000,000 tokens they are 106.8 GiB."""
    small = engine(layer_ids=(2, 30, 58, 61), hidden_size=7168)
    assert "caches of one sequence of 8,192 tokens 0.4 GiB" in check_gpu_fit(small, 0, 0, {0: H200}).needed
    long = engine(layer_ids=(2, 30, 58, 61), hidden_size=7168, max_model_len=2_000_000)
    assert "106.8 GiB" in check_gpu_fit(long, 0, 0, {0: H200}).needed
    assert not check_gpu_fit(long, 547 * 10**9, 0, dict.fromkeys(range(8), H200)).passed


def test_a_disk_that_is_too_small_says_how_much(tmp_path: Path) -> None:
    check = check_disk(tmp_path, 10**18, "states")
    assert not check.passed
    assert "needed 931,322,574.6 GiB" in check.line()


def test_a_draft_vocabulary_larger_than_the_verifiers_is_told_before_all_loads(context: StageContext) -> None:
    vocab = context.spec.vocab.model_copy(update={"draft_vocab_size": 321})
    spec = context.spec.model_copy(update={"vocab": vocab})
    (failed,) = [check.line() for check in preflight(StageContext(spec, home=context.home)) if not check.passed]
    expected = "draft vocabulary: found 321, needed 320 at most, the verifier's: lower vocab.draft_vocab_size"
    assert failed == f"FAIL  {expected}"


def test_a_wrong_template_and_wrong_layers_are_lines(context: StageContext, tmp_path: Path) -> None:
    spec = context.spec.model_copy(
        update={
            "capture": context.spec.capture.model_copy(update={"aux_layer_ids": [1, 2, 99]}),
            "verifier": context.spec.verifier.model_copy(update={"stop_tokens": ["<|nonsense|>"]}),
        }
    )
    failed = [c.line() for c in _until_error(StageContext(spec, home=tmp_path / "home"))]
    assert any("aux_layer_ids" in line and "99" in line for line in failed)
    assert any("nonsense" in line for line in failed)


def _until_error(context: StageContext) -> list:
    return [check for check in preflight(context) if not check.passed]


def test_a_pool_smaller_than_the_engine_is_told() -> None:
    check = check_pool(4, 2)
    assert check.line() == (
        "FAIL  GPUs of the pool: found 2, needed 4: raise resources.num_gpus, or lower resources.tensor_parallel_size"
    )
    assert check_pool(2, 2).passed


@pytest.mark.parametrize(
    ("processes", "accumulate", "gpus", "failed"),
    [
        (1, 1, 0, []),
        (1, 1, 8, []),
        (8, 8, 8, []),
        (8, 8, 4, ["GPUs for training: found 4, needed 8"]),
        # A step of one batch is work for one process.
        (8, 1, 8, ["batches of a training step: found 1, needed 8, one a process"]),
        (2, 2, 0, []),
        (2, 1, 0, ["batches of a training step: found 1, needed 2, one a process"]),
    ],
)
def test_training_processes_need_a_gpu_and_a_batch_each(
    processes: int, accumulate: int, gpus: int, failed: list[str]
) -> None:
    lines = [check.line() for check in check_processes(processes, accumulate, gpus) if not check.passed]
    assert [line.removeprefix("FAIL  ").rpartition(":")[0] for line in lines] == failed


def test_as_long_as_the_verifier_allows_is_not_too_long(context: StageContext) -> None:
    """The tiny Llama has 1,024 positions; a draft's one beyond the last token is asked for where there is one."""
    for longest, expected in ((64, 65), (1023, 1024), (1024, 1024)):
        assert with_longest(context, longest).engine_spec().max_model_len == expected
    check = next(c for c in preflight(with_longest(context, 1025)) if "positions" in c.what)
    assert not check.passed and check.needed == "1,025"


def with_longest(context: StageContext, longest: int) -> StageContext:
    spec = context.spec
    generation = spec.generation.model_copy(update={"max_sequence_tokens": longest})
    return StageContext(spec.model_copy(update={"generation": generation}), home=context.home)


def test_what_preflight_refuses_starts_no_engine(context: StageContext, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match="FAIL  positions of the verifier: found 1,024, needed 2,000"):
        open_engine(with_longest(context, 2000), context.engine_spec())
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "devices").write_text("a file where a folder should be")
    with pytest.raises(PreflightError, match="state folder .*devices"):
        open_engine(context, context.engine_spec())
    assert context.engines.starts() == []


def test_evaluation_prompts_that_do_not_fit_are_a_line(context: StageContext, tmp_path: Path) -> None:
    evaluation = context.spec.evaluation.model_copy(update={"max_new_tokens": 60})
    lines = [c.line() for c in preflight(StageContext(context.spec.model_copy(update={"evaluation": evaluation})))]
    (line,) = [line for line in lines if "evaluation prompts" in line]
    assert line.startswith("FAIL") and "exceed generation.max_sequence_tokens 64" in line


def test_no_engine_starts_without_memory(context: StageContext) -> None:
    spec = context.engine_spec(cpu_kvcache_gib=10_000_000.0)
    with pytest.raises(PreflightError, match="needed 10,000,002"):
        open_engine(context, spec)
    assert context.engines.starts() == []


def test_a_float32_engine_needs_twice_the_bytes() -> None:
    weights = 100 * GIB
    half = check_cpu_memory(engine(num_gpus=0, dtype="bfloat16", cpu_kvcache_gib=1.0), weights)
    full = check_cpu_memory(engine(num_gpus=0, dtype="float32", cpu_kvcache_gib=1.0), weights)
    assert (half.needed, full.needed) == ("103.0 GiB", "203.0 GiB")


def test_kv_bytes_of_attention_and_of_latent_attention(tmp_path: Path) -> None:
    verifier = resolve_verifier_of(make_tiny_llama(tmp_path / "a"))
    # 8 layers x (1 key head + 1 value head) x 64 x 2 bytes.
    assert verifier.kv_bytes_per_token == 8 * 2 * 64 * 2
    config = json.loads((tmp_path / "a" / "config.json").read_text()) | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    assert resolve_verifier_of(tmp_path / "a").kv_bytes_per_token == 8 * (512 + 64) * 2


def resolve_verifier_of(folder: Path):
    return resolve_verifier(
        PipelineSpec.model_validate(
            {
                "name": "p",
                "verifier": {"model": str(folder)},
                "dataset": {"path": "x"},
                "training": {"batch_tokens": 8192},
            }
        ).verifier
    )


def test_the_command_prints_every_line_fails_and_imports_no_vllm(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom eagle3_pipeline.cli import main\n"
        "try:\n    main(['preflight', 'kimi_k25'])\nexcept SystemExit as end:\n    code = end.code\n"
        "print([m for m in ('vllm', 'torch') if m in sys.modules], code)\n"
    )
    environment = {
        "EAGLE3_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.splitlines()
    assert sum(line.startswith("FAIL") for line in lines) == 2, done.stdout + done.stderr
    assert "GPUs: found 0, needed 8" in done.stdout
    assert lines[-1] == "[] 1"
