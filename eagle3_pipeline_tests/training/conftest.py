"""A tiny random verifier, its greedy answers and their hidden states, in the files that training reads."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3_pipeline.config import DraftSpec, NoiseSpec, TrainingSpec
from eagle3_pipeline.store.appender import ShardAppender
from eagle3_pipeline.store.shards import Geometry, seal_shards
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import train

VOCAB, HIDDEN, LAYERS, AUX_LAYER_IDS = 128, 32, 4, [1, 2, 3]
NUM_PROMPT_TOKENS, NUM_ANSWER_TOKENS = 7, 17
# Answers of a random verifier use few tokens; these leave some of them outside the draft vocabulary.
DRAFT_VOCAB = 96


@dataclass
class Row:
    """One training sequence of the toy data."""

    sequence_id: str
    conversation_id: str
    input_ids: list[int]
    loss_mask: list[bool]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    # More only spin on tensors of this size, and starve each other on a busy machine.
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    folder = tmp_path_factory.mktemp("verifier") / "tiny-llama"
    model.save_pretrained(folder)
    return folder, model


@torch.no_grad()
def capture(model: LlamaForCausalLM, input_ids: list[int]) -> torch.Tensor:
    """bf16 [n-1, A+1, H]: inputs of the aux layers, and what enters the final norm."""
    last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
    states = model(torch.tensor([input_ids[:-1]]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.stack([states[i][0] for i in AUX_LAYER_IDS] + [last[0][0]], dim=1).to(torch.bfloat16)


@torch.no_grad()
def _answer(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_ANSWER_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.fixture(scope="session")
def rows(verifier: tuple[Path, LlamaForCausalLM]) -> list[Row]:
    draw = np.random.default_rng(3)
    # Few prompts, so that what is learnt on training conversations holds for validation ones.
    answers = [_answer(verifier[1], draw.integers(0, VOCAB, NUM_PROMPT_TOKENS).tolist()) for _ in range(4)]
    made = []
    for number in range(20):
        ids = answers[number % 4]
        mask = [False] * NUM_PROMPT_TOKENS + [True] * NUM_ANSWER_TOKENS
        cut = NUM_PROMPT_TOKENS + 5 + number % (NUM_ANSWER_TOKENS - 5)
        # Two turns a conversation.
        made.append(Row(f"s{number}", f"c{number // 2}", ids[:cut], mask[:cut]))
    return made


def write_chunk(
    folder: Path, model: LlamaForCausalLM, rows: list[Row], skip: Collection[str] = (), lives: int = 1
) -> dict[str, str]:
    """Writes a chunk; the sequences in `skip` get no states; all `lives` but the last end before it is published."""
    folder.mkdir(parents=True)
    table = pa.Table.from_pylist(
        [{**vars(row), "turn": 0, "text": ""} for row in rows],
        schema=pa.schema(
            [
                ("sequence_id", pa.string()),
                ("conversation_id", pa.string()),
                ("turn", pa.int32()),
                ("input_ids", pa.list_(pa.int32())),
                ("loss_mask", pa.list_(pa.bool_())),
                ("text", pa.string()),
            ]
        ),
    )
    pq.write_table(table, folder / "sequences.parquet")
    geometry = Geometry((*AUX_LAYER_IDS, LAYERS), HIDDEN)
    tokens = {row.sequence_id: np.array(row.input_ids[:-1], dtype=np.int32) for row in rows}
    for _ in range(lives):
        # Small shards, so that a chunk has several; sequences go in backwards, so that order in a shard means nothing.
        appender = ShardAppender(folder / "states", geometry, 4096 + 30 * geometry.row_bytes)
        captured = [row for row in reversed(rows) if row.sequence_id not in skip]
        states = {row.sequence_id: capture(model, row.input_ids).view(torch.uint16).numpy() for row in captured}
        records = [appender.append(name, memoryview(values)) for name, values in states.items()]
        appender.close()
        seal_shards(folder / "states", records, tokens, geometry, {})
    return {
        "chunk": folder.name,
        "sequences": str(folder / "sequences.parquet"),
        "hidden_states": str(folder / "states"),
    }


@pytest.fixture(scope="session")
def vocab_map(tmp_path_factory: pytest.TempPathFactory, rows: list[Row]) -> tuple[Path, list[int]]:
    """The map's file and its verifier ids: the answers' tokens without the third most frequent, then others."""
    counts = Counter(t for r in rows for t, m in zip(r.input_ids, r.loss_mask, strict=True) if m)
    seen, dropped = sorted(counts), counts.most_common(3)[2][0]
    others = [t for t in range(VOCAB) if t not in seen]
    kept = sorted([t for t in seen if t != dropped] + others[: DRAFT_VOCAB - len(seen) + 1])
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[kept] = True
    path = tmp_path_factory.mktemp("vocab") / "vocab_map.safetensors"
    save_file({"t2d": t2d, "d2t": torch.tensor(kept) - torch.arange(len(kept))}, path)
    return path, kept


@pytest.fixture(scope="session")
def chunks(
    tmp_path_factory: pytest.TempPathFactory, verifier: tuple[Path, LlamaForCausalLM], rows: list[Row]
) -> list[dict[str, str]]:
    root = tmp_path_factory.mktemp("chunks")
    return [write_chunk(root / f"{i:06d}", verifier[1], rows[10 * i : 10 * i + 10]) for i in range(2)]


SpecMaker = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def spec_in(
    verifier: tuple[Path, LlamaForCausalLM], chunks: list[dict[str, str]], vocab_map: tuple[Path, list[int]]
) -> SpecMaker:
    """Makes a worker's spec: `top` replaces top-level keys, the other keywords are training settings."""

    def make(output: Path, top: dict[str, Any] | None = None, **training: Any) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "epochs": 2,
            "lr": 1e-3,
            "batch_tokens": 64,
            "min_validation_samples": 2,
            "noise": NoiseSpec(scale=0.01),
            "device": "cpu",
            "num_threads": 1,
        }
        output.mkdir(exist_ok=True)
        return {
            "job": "train",
            "verifier": {"path": str(verifier[0]), "trust_remote_code": False},
            "aux_layer_ids": AUX_LAYER_IDS,
            "draft": DraftSpec().model_dump(mode="json"),
            "training": TrainingSpec(**settings | training).model_dump(mode="json"),
            "chunks": chunks,
            "vocab_map": str(vocab_map[0]),
            "output": str(output),
            "init_from": None,
            "fingerprint": "f" * 64,
        } | (top or {})

    return make


@pytest.fixture
def make_spec(tmp_path: Path, spec_in: SpecMaker) -> SpecMaker:
    """`spec_in` with an output folder of the test."""
    return partial(spec_in, tmp_path / "output")


class Events:
    """Collects what a job emits."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        self.all.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [e for e in self.all if e["event"] == event]


@pytest.fixture
def events() -> Events:
    return Events()


@dataclass
class TrainedRun:
    """A finished run on the toy data."""

    spec: dict[str, Any]
    result: dict[str, Any]
    events: Events
    output: Path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, spec_in: SpecMaker) -> TrainedRun:
    output, collected = tmp_path_factory.mktemp("trained"), Events()
    settings = {"epochs": 10, "lr": 1e-2, "noise": NoiseSpec(kind="none"), "log_every_s": 0.001}
    spec = spec_in(output, **settings)
    return TrainedRun(spec, train(Job.parse(spec), collected), collected, output)
