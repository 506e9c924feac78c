"""The reference architecture, tiny, through the whole graph with real vLLM on CPU. Tests run in order."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from eagle3_pipeline.config import CaptureSpec, PipelineSpec
from eagle3_pipeline.data.chat_template import ChatTemplate, load_tokenizer
from eagle3_pipeline.data.verifier_head import load_head
from eagle3_pipeline.engine.vllm_backend import engine_arguments
from eagle3_pipeline.planning import plan
from eagle3_pipeline.stages import identity as ids
from eagle3_pipeline.stages.dataset import materialise_dataset
from eagle3_pipeline.stages.verifier_outputs import SEQUENCES, materialise_outputs
from eagle3_pipeline_tests.e2e.conftest import WORDS, Home, open_home
from eagle3_pipeline_tests.opened_files import opened_files
from eagle3_pipeline_tests.state_parity import assert_states_match_transformers, captured_states
from eagle3_pipeline_tests.tiny_kimi import HEAD_SHARD, HEAD_TENSORS, TOKEN_IDS, make_tiny_kimi

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SECTIONS: dict[str, dict] = {
    "verifier": {
        "model": "${EAGLE3_HOME}/models/kimi",
        "trust_remote_code": True,
        "stop_tokens": ["<|im_end|>"],
        "dtype": "float32",
    },
    "dataset": {"samples_per_chunk": 200},
    "generation": {"max_new_tokens": 16, "max_sequence_tokens": 192},
    # With the input of the last layer, to compare it with that layer's output.
    "capture": {"aux_layer_ids": [2, 4, 7]},
    "vocab": {"draft_vocab_size": 240},
    # The reference draft's form, smaller.
    "draft": {
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rope_theta": 1.0e6,
        "rms_norm_eps": 1.0e-6,
    },
}
NUM_TURNS = 2 * len(WORDS) ** 2


@pytest.fixture(scope="module")
def kimi_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with open_home(tmp_path_factory.mktemp("kimi_home")) as home:
        make_tiny_kimi(home.path / "models" / "kimi")
        rows = [
            {
                "conversations": [
                    {"from": "human", "value": f"{a} or {b}?"},
                    {"from": "gpt", "value": a},
                    {"from": "human", "value": f"why {a}?"},
                ]
            }
            for a in WORDS
            for b in WORDS
        ]
        (home.path / "data" / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        prompts = [{"category": c, "prompt": f"{c} {w}"} for c in ("first", "second") for w in WORDS[:3]]
        (home.path / "prompts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in prompts))
        yield home


@pytest.fixture(scope="module")
def kimi(kimi_home: Home) -> PipelineSpec:
    spec = kimi_home.write_pipeline("kimi", **SECTIONS)
    kimi_home.sync(spec)
    return spec


@pytest.fixture(scope="module")
def folder(kimi_home: Home) -> Path:
    return kimi_home.path / "models" / "kimi"


def test_kimi_config_is_resolved(kimi_home: Home, kimi: PipelineSpec) -> None:
    context = kimi_home.context(kimi)
    verifier = context.verifier
    assert verifier.architecture == "KimiK25ForConditionalGeneration"
    assert (verifier.num_layers, verifier.hidden_size, verifier.vocab_size) == (8, 128, 320)
    assert verifier.max_positions == 4096
    # Latent attention keeps kv_lora_rank + qk_rope_head_dim values of 2 bytes per layer.
    assert verifier.kv_bytes_per_token == 8 * (512 + 64) * 2
    assert verifier.geometry(kimi.capture).layer_ids == (2, 4, 7, 8)
    assert verifier.geometry(CaptureSpec()).layer_ids == (2, 4, 5, 8), "2, n // 2, n - 3, and n"


def test_kimi_template_and_its_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder), True)
    assert not tokenizer.is_fast
    assert tokenizer.eos_token == "[EOS]"
    turns = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    template = ChatTemplate(tokenizer, None, {}, ["<|im_end|>"])
    text = template.render(turns, generation_prompt=True)
    assert text == (
        "<|im_user|>user<|im_middle|>é<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>b<|im_end|>"
        "<|im_user|>user<|im_middle|>c<|im_end|><|im_assistant|>assistant<|im_middle|><think>"
    )
    tokens = template.encode(text)
    assert tokens[:8] == [TOKEN_IDS["<|im_user|>"], *b"user", TOKEN_IDS["<|im_middle|>"], *"é".encode()]
    assert tokens[-1] == TOKEN_IDS["<think>"]
    assert template.decode(tokens) == text
    instant = ChatTemplate(tokenizer, None, {"thinking": False}, ["<|im_end|>"])
    assert instant.render(turns, generation_prompt=True) == text + "</think>"
    assert instant.stop_token_ids == [257, 258], "[EOS] and <|im_end|>"


def test_kimi_engine_runs_the_language_model_alone(kimi_home: Home, kimi: PipelineSpec) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = engine_arguments(kimi_home.context(kimi).engine_spec())
    config = AsyncEngineArgs(**arguments).create_engine_config().model_config
    assert config.is_multimodal_model
    assert config.get_multimodal_config().get_limit_per_prompt("vision_chunk") == 0


def test_kimi_head_is_read_from_one_shard(folder: Path) -> None:
    from eagle3_pipeline.training.draft_config import read_verifier_config
    from eagle3_pipeline.training.draft_model import load_verifier_weights

    with safe_open(folder / HEAD_SHARD, "np") as file:
        assert set(file.keys()) == set(HEAD_TENSORS)
        lm_head, embed_tokens, norm = (file.get_tensor(name) for name in HEAD_TENSORS)
    index = "model.safetensors.index.json"
    assert len(set(json.loads((folder / index).read_text())["weight_map"].values())) == 5
    states = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)
    load_head.cache_clear()
    with opened_files(folder) as opened:
        head = load_head(str(folder))
        assert head
        logits = head.logits(states)
    assert opened == {"config.json", index, HEAD_SHARD}
    scale = np.sqrt((states**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(logits, states / scale * norm @ lm_head.T, rtol=1e-4, atol=1e-5)

    config = read_verifier_config(folder, trust_remote_code=True)
    with opened_files(folder) as opened:
        weights = load_verifier_weights(folder, config)
    assert opened == {"config.json", index, HEAD_SHARD}
    np.testing.assert_array_equal(weights.lm_head.numpy(), lm_head)
    np.testing.assert_array_equal(weights.embed_tokens.numpy(), embed_tokens)
    np.testing.assert_array_equal(weights.norm.numpy(), norm)


def test_kimi_states_match_transformers(kimi_home: Home, kimi: PipelineSpec, folder: Path) -> None:
    context = kimi_home.context(kimi)
    materialise_dataset(context, "000000")
    made = materialise_outputs(context, "000000")
    assert made.generations and made.hidden_states
    assert made.hidden_states.manifest.metrics["one_pass"] == 1
    assert made.generations.manifest.metrics["num_sequences"] == NUM_TURNS, "a sequence for every user turn"
    for row in pq.read_table(made.generations.artifact.path(SEQUENCES)).to_pylist():
        assert row["input_ids"][row["num_prompt_tokens"] - 1] == TOKEN_IDS["<think>"]
        assert row["loss_mask"] == [i >= row["num_prompt_tokens"] for i in range(len(row["input_ids"]))]
        stopped = row["input_ids"][-1] in (TOKEN_IDS["[EOS]"], TOKEN_IDS["<|im_end|>"])
        assert row["finish_reason"] == ("stop" if stopped else "length")
    worst = assert_states_match_transformers(
        folder,
        made.generations.artifact,
        made.hidden_states.artifact,
        rerouted=0.01,
        every=4,
        expected_ids=(2, 4, 7, 8),
    )
    print("largest relative error by layer:", worst)


def test_kimi_draft_is_trained_and_served(kimi_home: Home, kimi: PipelineSpec, capsys: pytest.CaptureFixture) -> None:
    started = time.monotonic()
    kimi_home.materialise(kimi)
    context = kimi_home.context(kimi)
    assert plan(context).todo == []
    found = context.upstream(ids.DRAFT_EVALUATION).manifest.metrics
    assert found["num_drafts"] > 0
    assert found["num_differences"] == found["num_near_ties"]
    draft = json.loads((context.upstream(ids.DRAFT_CHECKPOINT).folder / "config.json").read_text())
    assert draft["eagle_aux_hidden_state_layer_ids"] == [2, 4, 7]
    assert draft["speculators_config"]["verifier"]["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert (context.references.folder / "published_draft" / "config.json").exists()
    with capsys.disabled():
        print(
            f"\nkimi: served acceptance length {found['acceptance_length']:.3f} "
            f"(simulated {1 + found['simulated_accepted_per_draft']:.3f}), {time.monotonic() - started:.0f} s"
        )


def test_kimi_last_layer_names_the_next_token(
    kimi_home: Home, kimi: PipelineSpec, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    context = kimi_home.context(kimi)
    sequences = pq.read_table(context.upstream(ids.SYNTHETIC_GENERATIONS, "000000").path(SEQUENCES)).to_pylist()
    captured = captured_states(context.upstream(ids.HIDDEN_STATES, "000000"))
    tokens = np.asarray([row["input_ids"][-1] for row in sequences])
    last_rows = np.stack([captured[row["sequence_id"]][-1] for row in sequences])
    head = load_head(str(folder))
    assert head
    before, last = (float((head.logits(last_rows[:, i]).argmax(axis=1) == tokens).mean()) for i in (2, 3))
    with capsys.disabled():
        print(f"\nkimi: next token named by layer 8: {last:.1%}, by layer 7: {before:.1%} of {len(tokens)} sequences")
    assert last >= 0.99
    assert before <= 0.70
