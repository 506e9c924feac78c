"""Job "simulate" measures what training's validation measures, on any data and depth."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training import draft_model
from eagle3_pipeline.training import prepare as preparing
from eagle3_pipeline.training.dataset import PackedCollate
from eagle3_pipeline.training.draft_model import resolve_attention
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.prepare import prepare
from eagle3_pipeline.training.simulate import simulate
from eagle3_pipeline.training.split import validation_conversations
from eagle3_pipeline_tests.training.conftest import VOCAB, Events, Row, SpecMaker, TrainedRun, write_chunk

Verifier = tuple[Path, LlamaForCausalLM]


@pytest.fixture
def validation_chunk(tmp_path: Path, verifier: Verifier, rows: list[Row]) -> dict[str, str]:
    held_out = validation_conversations((r.conversation_id for r in rows), 0.05, 2)
    return write_chunk(tmp_path / "val", verifier[1], [r for r in rows if r.conversation_id in held_out])


def of(trained: TrainedRun, chunk: dict[str, str], **top: Any) -> Job:
    return Job.parse({**trained.spec, "job": "simulate", "chunks": [chunk], "num_steps": 3, **top})


def test_padding_changes_nothing(
    trained: TrainedRun, validation_chunk: dict[str, str], events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Beside a GPU batches are padded; not compiled, attention sees the padding.
    job = of(trained, validation_chunk, checkpoint=trained.spec["output"])
    expected = simulate(job, events)
    monkeypatch.setattr(preparing, "PackedCollate", lambda *_args, **_kwargs: PackedCollate(384))
    padded = simulate(job, events)
    assert {**padded, "tokens_per_s": 0.0} == {**expected, "tokens_per_s": 0.0}


def test_a_simulation_compiles_nothing(trained: TrainedRun, validation_chunk: dict[str, str], gpu: None) -> None:
    job = of(trained, validation_chunk)
    assert (resolve_attention(replace(job, kind="train")), resolve_attention(job)) == ("flex_attention", "sdpa")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, as far as choices go."""
    monkeypatch.setattr(draft_model, "resolve_device", lambda _job: torch.device("cuda"))


def test_untrained_equals_initial_validation(
    trained: TrainedRun, validation_chunk: dict[str, str], events: Events
) -> None:
    result = simulate(of(trained, validation_chunk), events)
    initial = trained.events.of("epoch")[0]
    assert result["acceptance_length"] == trained.result["metrics"]["initial_val_acceptance_length"]
    assert result["full_acc"] == [initial[f"val_full_acc_{i}"] for i in range(3)]
    assert result["conditional_acc"] == [initial[f"val_conditional_acc_{i}"] for i in range(3)]
    assert result["outside_draft_vocab_share"] == initial["val_outside_draft_vocab_share"]


def test_checkpoint_equals_its_validation(
    trained: TrainedRun, validation_chunk: dict[str, str], events: Events
) -> None:
    """The export is rounded to bf16, which may tip a near-tie."""
    result = simulate(of(trained, validation_chunk, checkpoint=str(trained.output)), events)
    expected = trained.result["metrics"]
    assert result["acceptance_length"] == pytest.approx(expected["val_acceptance_length"], abs=0.1)
    assert result["full_acc"][0] == pytest.approx(expected["val_full_acc_0"], abs=0.06)
    assert result["num_positions"] == expected["supervised_tokens_val"] - expected["sequences_val"]


def test_more_steps_extend_fewer(trained: TrainedRun, validation_chunk: dict[str, str], events: Events) -> None:
    shallow, deep = (
        simulate(of(trained, validation_chunk, checkpoint=str(trained.output), num_steps=k), events) for k in (2, 4)
    )
    assert deep["full_acc"][:2] == shallow["full_acc"]
    assert len(deep["full_acc"]) == len(deep["conditional_acc"]) == 4
    assert shallow["acceptance_length"] == 1 + sum(shallow["full_acc"])


def remapped(folder: Path, source: Path, ids: list[int]) -> Path:
    """A copy of a checkpoint with the draft vocabulary `ids` and recognisable output rows."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.arange(len(ids))[:, None].expand(-1, 32).to(torch.bfloat16).contiguous()
    tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][ids] = True
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_warm_start_moves_output_rows_by_verifier_id(
    trained: TrainedRun,
    make_spec: SpecMaker,
    events: Events,
    tmp_path: Path,
    verifier: Verifier,
    vocab_map: tuple[Path, list[int]],
) -> None:
    saved_ids = list(range(10, 110))
    parent = remapped(tmp_path / "parent", trained.output, saved_ids)
    model = prepare(Job.parse(make_spec({"init_from": str(parent)})), events).model
    for draft_id, verifier_id in enumerate(vocab_map[1]):
        row = model.lm_head.weight[draft_id]
        if verifier_id in saved_ids:
            assert (row == saved_ids.index(verifier_id)).all()
        else:
            assert torch.equal(row, verifier[1].lm_head.weight[verifier_id].float())
    assert torch.equal(model.fc.weight, load_file(parent / "model.safetensors")["fc.weight"].float())


def test_checkpoint_of_another_vocabulary_is_refused(
    trained: TrainedRun, validation_chunk: dict[str, str], events: Events, tmp_path: Path
) -> None:
    other = remapped(tmp_path / "other", trained.output, list(range(96)))
    with pytest.raises(TrainingError, match="has another draft vocabulary"):
        simulate(of(trained, validation_chunk, checkpoint=str(other)), events)


def test_checkpoint_of_another_geometry_is_refused(trained: TrainedRun, make_spec: SpecMaker, events: Events) -> None:
    spec = make_spec({"init_from": str(trained.output)})
    spec["draft"]["intermediate_size"] = 48
    message = r"does not fit this draft's geometry: layers.0.mlp.down_proj.weight: \[32, 64\], expected \[32, 48\]"
    with pytest.raises(TrainingError, match=message):
        prepare(Job.parse(spec), events)
