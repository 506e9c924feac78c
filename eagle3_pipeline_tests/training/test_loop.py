"""The loop on toy data: what it learns, reports, keeps and refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from eagle3_pipeline.config import TrainingSpec
from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import Trainer, train
from eagle3_pipeline.training.optim import learning_rate
from eagle3_pipeline.training.prepare import prepare
from eagle3_pipeline_tests.training.conftest import Events, Row, SpecMaker, TrainedRun, write_chunk

RESULT_METRICS = set(
    """
    epochs steps num_tokens best_epoch train_loss val_loss val_full_acc_0 val_full_acc_1 val_full_acc_2
    val_acceptance_length initial_val_acceptance_length outside_draft_vocab_share supervised_tokens_train
    supervised_tokens_val
    sequences_train sequences_val tokens_per_s data_wait_share peak_memory_bytes trainable_parameters
    """.split()  # noqa: SIM905
)


def test_memorizable_data_raises_acceptance_length(trained: TrainedRun, rows: list[Row]) -> None:
    metrics = trained.result["metrics"]
    assert metrics["initial_val_acceptance_length"] < 1.2
    assert metrics["val_acceptance_length"] > metrics["initial_val_acceptance_length"] + 0.5
    full = [metrics[f"val_full_acc_{i}"] for i in range(3)]
    assert metrics["val_acceptance_length"] == pytest.approx(1 + sum(full))
    assert metrics["supervised_tokens_train"] + metrics["supervised_tokens_val"] == sum(
        sum(row.loss_mask) for row in rows
    )
    assert (metrics["sequences_train"], metrics["sequences_val"]) == (16, 4)
    assert 0 < metrics["outside_draft_vocab_share"] < 0.3


def test_result_and_events(trained: TrainedRun) -> None:
    metrics = trained.result["metrics"]
    assert metrics.keys() >= RESULT_METRICS
    assert all(isinstance(value, int | float) for value in metrics.values())
    assert json.dumps(trained.result)
    assert trained.result["stopped_early"] is False
    assert [e["epoch"] for e in trained.events.of("epoch")] == list(range(11))
    line = r"epoch \d+/10 step \d+/\d+ loss [\d.]+ acceptance length [\d.]+ \d+ tok/s ETA \d+ min"
    messages = [e["message"] for e in trained.events.of("progress")]
    assert len(messages) > 5
    for message in messages:
        assert re.fullmatch(line, message), message
    # Of the first step too, whose time was counted after its line: at the end the speed is of all the time.
    told = re.findall(r"(\d+) tok/s", " ".join(messages))
    assert max(map(int, told)) < 100 * metrics["tokens_per_s"]


def test_output_folder(trained: TrainedRun) -> None:
    names = sorted(p.name for p in trained.output.iterdir())
    metrics = trained.result["metrics"]
    last = [] if metrics["best_epoch"] == metrics["epochs"] else ["last"]
    assert names == ["config.json", "curves.png", *last, "metrics.parquet", "model.safetensors"]
    assert (trained.output / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = pq.read_table(trained.output / "metrics.parquet")
    assert table.column_names == ["kind", "step", "epoch", "split", "name", "value"]
    rows = table.to_pylist()
    steps = [r["step"] for r in rows if (r["kind"], r["name"]) == ("step", "loss")]
    assert steps == list(range(1, trained.result["metrics"]["steps"] + 1))
    validated = {r["epoch"]: r["value"] for r in rows if (r["split"], r["name"]) == ("val", "acceptance_length")}
    best = trained.result["metrics"]["best_epoch"]
    assert validated[best] == max(v for epoch, v in validated.items() if epoch)
    assert validated[best] == trained.result["metrics"]["val_acceptance_length"]


def test_stops_when_acceptance_does_not_grow(
    make_spec: SpecMaker, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = iter([1.0, 1.5, 1.9, 1.8, 1.7, 1.6])
    record = Trainer._record_epoch
    weights: dict[int, torch.Tensor] = {}

    def scripted(self: Trainer, epoch: int, values: dict[str, float], train_loss: float | None) -> None:
        weights[epoch] = self.model.fc.weight.detach().to(torch.bfloat16)
        record(self, epoch, {**values, "acceptance_length": next(lengths)}, train_loss)

    monkeypatch.setattr(Trainer, "_record_epoch", scripted)
    spec = make_spec(epochs=9, patience=2, lr=1e-2)
    result = train(Job.parse(spec), events)
    assert result["stopped_early"] is True
    assert (result["metrics"]["epochs"], result["metrics"]["best_epoch"]) == (4, 2)
    exported = load_file(Path(spec["output"]) / "model.safetensors")["fc.weight"]
    assert torch.equal(exported, weights[2])
    assert not torch.equal(exported, weights[4])
    last = Path(spec["output"]) / "last"
    assert torch.equal(load_file(last / "model.safetensors")["fc.weight"], weights[4])
    assert sorted(path.name for path in last.iterdir()) == ["config.json", "model.safetensors"]


def test_frozen_output_layer_stays_the_verifiers(
    make_spec: SpecMaker, events: Events, verifier: tuple[Path, LlamaForCausalLM], vocab_map: tuple[Path, list[int]]
) -> None:
    spec = make_spec(epochs=1, train_lm_head=False, lr=1e-2)
    train(Job.parse(spec), events)
    tensors = load_file(Path(spec["output"]) / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], verifier[1].lm_head.weight[vocab_map[1]])
    assert torch.equal(tensors["embed_tokens.weight"], verifier[1].model.embed_tokens.weight)


def test_accumulation_weighs_tokens_not_batches(make_spec: SpecMaker, events: Events) -> None:
    """Two batches in one step give the gradient of all their tokens as one batch would."""
    gradients = []
    for batch_tokens, accumulate in ((400, 1), (40, 100)):
        settings = {"batch_tokens": batch_tokens, "accumulate": accumulate, "noise": {"kind": "none"}}
        trainer = Trainer(Job.parse(make_spec(**settings, max_grad_norm=1e9)), events)
        group = next(trainer._groups())
        trainer.optimizers = []
        trainer._step(group)
        gradients.append(trainer.model.fc.weight.grad)
        assert group.num_batches == len(group.batches) == trainer.batches_of[0]
    assert torch.nn.functional.cosine_similarity(gradients[0].flatten(), gradients[1].flatten(), 0) > 0.999
    assert float(gradients[0].norm()) == pytest.approx(float(gradients[1].norm()), rel=0.01)


def test_zero_supervised_tokens(
    make_spec: SpecMaker, events: Events, tmp_path: Path, verifier: tuple[Path, LlamaForCausalLM], rows: list[Row]
) -> None:
    blank = [Row(r.sequence_id, r.conversation_id, r.input_ids, [False] * len(r.input_ids)) for r in rows]
    chunk = write_chunk(tmp_path / "c", verifier[1], blank)
    with pytest.raises(TrainingError, match="0 supervised tokens in the 16 training sequences"):
        train(Job.parse(make_spec({"chunks": [chunk]})), events)


def test_sequence_longer_than_a_batch(make_spec: SpecMaker, events: Events) -> None:
    with pytest.raises(TrainingError, match=r"longest sequence has 23 tokens, training.batch_tokens is 22"):
        prepare(Job.parse(make_spec(batch_tokens=22)), events)


def test_layers_that_were_not_captured(make_spec: SpecMaker, events: Events) -> None:
    with pytest.raises(TrainingError, match=r"hidden_states is BF16 \[\d+, 4, 32\], expected BF16 \[\d+, 3, 32\]"):
        prepare(Job.parse(make_spec({"aux_layer_ids": [1, 2]})), events)


def test_diverged_loss(make_spec: SpecMaker, events: Events) -> None:
    trainer = Trainer(Job.parse(make_spec()), events)
    with torch.no_grad():
        trainer.model.fc.weight.fill_(torch.nan)
    with pytest.raises(TrainingError, match="the loss became nan at step 1"):
        trainer._step(next(trainer._groups()))
        trainer._save()
    assert not list(trainer.job.output.iterdir())


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("cosine", [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("linear", [0.5, 1.0, 1.0, 0.5, 0.0]),
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rate(scheduler: Any, expected: list[float]) -> None:
    """Ten steps, two of warm-up; step 6 is half-way through the eight others."""
    spec = TrainingSpec(lr=1.0, warmup_ratio=0.2, scheduler=scheduler)
    assert [learning_rate(spec, step, 10) for step in (0, 1, 2, 6, 10)] == pytest.approx(expected, abs=1e-12)


def test_worker_explains_failures(make_spec: SpecMaker, tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(make_spec({"vocab_map": "/nowhere/vocab_map.safetensors"})))
    command = [sys.executable, "-m", "eagle3_pipeline.training.worker", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    event = json.loads(done.stdout.splitlines()[-1])
    assert event["event"] == "error"
    assert event["message"].startswith("/nowhere/vocab_map.safetensors is not a vocabulary map")


def test_package_import_is_light() -> None:
    code = "import sys, eagle3_pipeline.training; sys.exit(bool({'torch', 'speculators'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
