"""Which corrections of vLLM apply to which model, and what its registry says of an architecture."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.engine import corrections as module
from eagle3_pipeline.engine.corrections import LAST_LAYER, SHARED_BLOCKS, UNDRAFTED, corrections
from eagle3_pipeline.engine.preflight import check_processor, check_registry
from eagle3_pipeline.engine.spec import EngineSpec
from eagle3_pipeline.engine.vllm_backend import engine_arguments, set_environment
from eagle3_pipeline.engine.vllm_registry import RegistryAnswer, ask_registry


def _model(folder: Path, architecture: str, **text: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **text}))
    module._config.cache_clear()
    return str(folder)


@pytest.mark.parametrize(
    ("architecture", "text", "version", "on_cpu", "expected"),
    [
        ("LlamaForCausalLM", {}, "0.32", True, [UNDRAFTED]),
        ("LlamaForCausalLM", {}, "0.24", False, [UNDRAFTED]),
        ("LlamaForCausalLM", {}, "0.33", False, []),
        ("Qwen3NextForCausalLM", {}, "0.32", True, []),
        ("NemotronHForCausalLM", {}, "0.32", True, []),
        ("SomethingNewForCausalLM", {}, "0.32", True, []),
        (
            "KimiK25ForConditionalGeneration",
            {"text_config": {"kv_lora_rank": 8}},
            "0.32",
            True,
            [UNDRAFTED, SHARED_BLOCKS],
        ),
        (
            "KimiK25ForConditionalGeneration",
            {"text_config": {"kv_lora_rank": 8}},
            "0.24",
            False,
            [UNDRAFTED, LAST_LAYER],
        ),
    ],
)
def test_corrections_apply_where_they_were_proved(
    tmp_path: Path, architecture: str, text: dict[str, Any], version: str, on_cpu: bool, expected: list[str]
) -> None:
    assert corrections(_model(tmp_path / "m", architecture, **text), True, on_cpu, version) == expected


def test_an_engine_that_does_not_capture_needs_those_of_serving_only(tmp_path: Path) -> None:
    folder = _model(tmp_path / "m", "KimiK25ForConditionalGeneration", text_config={"kv_lora_rank": 8})
    assert corrections(folder, False, True, "0.32") == [SHARED_BLOCKS]
    assert corrections(folder, False, False, "0.24") == []


@pytest.mark.parametrize(("architecture", "undrafted"), [("LlamaForCausalLM", True), ("Qwen3NextForCausalLM", False)])
def test_elsewhere_vllm_captures_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, undrafted: bool
) -> None:
    monkeypatch.setattr("eagle3_pipeline.engine.vllm_backend.installed_version", lambda: "0.32")
    environment: dict[str, str] = {}
    monkeypatch.setattr("os.environ", environment)
    folder = _model(tmp_path / "m", architecture)
    spec = EngineSpec(folder, "id", "bfloat16", False, 64, layer_ids=(1, 2, 3, 4), hidden_size=8)
    set_environment(spec)
    arguments = engine_arguments(spec)
    assert ("scheduler_cls" in arguments, arguments["async_scheduling"]) == (undrafted, undrafted)
    assert environment[module.VARIABLE] == (UNDRAFTED if undrafted else "")


@pytest.mark.parametrize(
    ("text", "dtype", "gpus", "expected"),
    [
        ({"kv_lora_rank": 8}, "float32", 0, "CPU_MLA"),
        ({"kv_lora_rank": 8}, "bfloat16", 0, None),
        ({"kv_lora_rank": 8}, "float32", 1, None),
        ({}, "float32", 0, None),
    ],
)
def test_latent_attention_in_float32_takes_no_kernel_for_16_bit_weights(
    tmp_path: Path, text: dict[str, Any], dtype: str, gpus: int, expected: str | None
) -> None:
    """Whatever the processor is: on one with AMX vLLM 0.32 would, and end while it loads."""
    folder = _model(tmp_path / "m", "DeepseekV3ForCausalLM", **text)
    assert (
        engine_arguments(EngineSpec(folder, "id", dtype, False, 64, num_gpus=gpus)).get("attention_backend") == expected
    )


@pytest.mark.vllm
def test_the_registry_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = ask_registry("Gemma3ForCausalLM", tmp_path)
    assert (answer.known, answer.gives_states, answer.error) == (True, False, "")
    monkeypatch.setattr(subprocess, "run", None)
    assert ask_registry("Gemma3ForCausalLM", tmp_path) == answer


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "known", "gives_states"),
    [("LlamaForCausalLM", True, True), ("Qwen3NextForCausalLM", True, True), ("NoSuchForCausalLM", False, False)],
)
def test_the_registry_tells_what_can_be_captured(
    tmp_path: Path, architecture: str, known: bool, gives_states: bool
) -> None:
    answer = ask_registry(architecture, tmp_path)
    assert (answer.known, answer.gives_states) == (known, gives_states)


@pytest.mark.parametrize(
    ("answer", "needs_states", "passed", "found"),
    [
        (RegistryAnswer("0.32", True, True), True, True, "vLLM 0.32"),
        (RegistryAnswer("0.32", True, False), True, False, "SupportsEagle3"),
        (RegistryAnswer("0.32", True, False), False, True, "vLLM 0.32"),
        (RegistryAnswer("0.32"), False, False, "has none"),
        (RegistryAnswer("0.32", True, error="No module named 'torchvision'"), False, False, "torchvision"),
        (RegistryAnswer(""), True, False, "no vLLM"),
    ],
)
def test_preflight_says_what_the_registry_says(
    answer: RegistryAnswer, needs_states: bool, passed: bool, found: str
) -> None:
    check = check_registry(answer, "XForCausalLM", needs_states)
    assert check.passed is passed and found in check.found


@pytest.mark.parametrize(
    ("flags", "passed"), [({"avx2"}, True), ({"avx512f", "amx_tile"}, True), ({"sse2"}, False), (set(), False)]
)
def test_preflight_asks_for_the_processor(flags: set[str], passed: bool) -> None:
    check = check_processor(flags)
    assert check.passed is passed
    assert ("AMX" in check.found) == ("amx_tile" in flags)
