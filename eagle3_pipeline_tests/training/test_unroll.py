"""The unrolled draft against speculators' own forward; attention masks against speculators' masks."""

from collections.abc import Iterator

import pytest
import torch
from speculators.models.eagle3.attention import (
    create_combined_mask_mod,
    extend_dense_mask_for_draft_tokens,
    extend_mask_for_draft_tokens,
)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from eagle3_pipeline.errors import TrainingError
from eagle3_pipeline.training.attention import attention_masks
from eagle3_pipeline.training.dataset import Batch, PackedCollate
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.loop import Trainer
from eagle3_pipeline.training.probe import probe_step
from eagle3_pipeline.training.progress import only_supervised, supervised_mask, with_all_targets
from eagle3_pipeline.training.unroll import OwnForward, Unroll, Unrolled, eager_loss
from eagle3_pipeline_tests.training.conftest import Events, SpecMaker

STEPS = 3


@pytest.fixture
def trainer(make_spec: SpecMaker, events: Events) -> Trainer:
    return Trainer(Job.parse(make_spec(ttt_loss_decay=0.7)), events)


@pytest.fixture
def batch(trainer: Trainer) -> Batch:
    """Three sequences and padding."""
    return PackedCollate(80)([trainer.train_set[i] for i in (3, 4, 5)])


def _run(trainer: Trainer, forward: Unroll | OwnForward, batch: Batch) -> tuple[Unrolled, torch.Tensor]:
    """What comes out, and all gradients in a row."""
    trainer.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        found = forward(batch, want_tokens=True)
    found.loss.backward()
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    return found, torch.cat(gradients)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 6])
def test_equals_speculators_own_forward(
    make_spec: SpecMaker, events: Events, attention: str, window: int | None
) -> None:
    draft = {"draft": {"sliding_window": window}}
    trainer = Trainer(Job.parse(make_spec(draft, attention=attention)), events)
    packed = PackedCollate(80)([trainer.train_set[i] for i in (3, 4, 5)])
    mask = supervised_mask(packed, STEPS)
    assert 10 < int(mask.sum()) < 40
    ours = Unroll(trainer.model, STEPS, 0.7, eager_loss, compiles=False)
    theirs = OwnForward(trainer.model, STEPS, 0.7)
    expected, their_gradients = _run(trainer, theirs, {**packed, "loss_mask": mask})
    assert expected.losses[0] > 1
    for batch in (with_all_targets(packed, mask), *(only_supervised(packed, STEPS, multiple) for multiple in (1, 64))):
        found, gradients = _run(trainer, ours, batch)
        assert found.losses.tolist() == pytest.approx(expected.losses.tolist(), rel=1e-6)
        assert float((gradients - their_gradients).norm() / their_gradients.norm()) < 5e-3
    found, _ = _run(trainer, ours, with_all_targets(packed, mask))
    for step, (tokens, their_tokens) in enumerate(zip(found.draft_tokens, expected.draft_tokens, strict=True)):
        # The last positions' targets lie behind the end.
        assert torch.equal(tokens[:, : 80 - step], their_tokens[:, : 80 - step])


def test_targets_are_the_supervised_positions(batch: Batch) -> None:
    mask = supervised_mask(batch, STEPS)
    found = only_supervised(batch, STEPS, 64)
    count = int(mask.sum())
    assert len(found["targets"]) == len(found["weights"]) == 64
    assert found["targets"][:count].tolist() == mask[0].nonzero()[:, 0].tolist()
    assert found["weights"].tolist() == [1.0] * count + [0.0] * (64 - count)
    # Every step has logits of its own for a target.
    assert int(found["targets"][:count].min()) >= STEPS - 1


def test_a_batch_without_targets_has_no_loss(trainer: Trainer, batch: Batch) -> None:
    nothing = only_supervised({**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}, STEPS, 1)
    found, gradients = _run(trainer, Unroll(trainer.model, STEPS, 1.0, eager_loss, compiles=False), nothing)
    assert found.losses.tolist() == [0.0] * (1 + STEPS)
    assert not gradients.any()


def test_compiled_equals_plain(trainer: Trainer, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the tracer alone; what a GPU's compiler makes of it is measured there."""
    monkeypatch.setattr("eagle3_pipeline.training.unroll._compile", lambda part: torch.compile(part, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 1)
    plain, compiled = (Unroll(trainer.model, STEPS, 0.7, eager_loss, compiles) for compiles in (False, True))
    assert torch._dynamo.config.recompile_limit == 4 * STEPS
    ready = only_supervised(batch, STEPS, 1)
    (expected, gradients), (found, compiled_gradients) = (_run(trainer, way, ready) for way in (plain, compiled))
    assert torch.equal(found.losses, expected.losses)
    assert torch.equal(compiled_gradients, gradients)


def _flex(trainer: Trainer, window: int | None) -> None:
    trainer.model.config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    trainer.model.sliding_window = window


def _packings() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    for lengths in ([1024], [128, 256, 640], [300, 1, 500, 90], [5] * 40, []):
        packed = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
        yield torch.nn.functional.pad(packed, (0, 1024 - len(packed)), value=-1)
    for _ in range(10):
        lengths = torch.randint(1, 400, (4,), generator=draw)
        packed = torch.repeat_interleave(torch.arange(4), lengths)[:1024]
        yield torch.nn.functional.pad(packed, (0, 1024 - len(packed)), value=-1)


def _listed(numbers: torch.Tensor | None, indices: torch.Tensor | None) -> list[list[int]]:
    assert numbers is not None and indices is not None
    return [row[:count].tolist() for row, count in zip(indices[0, 0], numbers[0, 0], strict=True)]


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
def test_block_masks_are_speculators(trainer: Trainer, window: int | None) -> None:
    _flex(trainer, window)
    for documents in _packings():
        allowed = create_combined_mask_mod(documents, 1024, sliding_window=window)
        expected = create_block_mask(allowed, None, None, 1024, 1024, device="cpu")
        for found in attention_masks(trainer.model, documents, STEPS):
            assert isinstance(found, BlockMask)
            assert found.seq_lengths == expected.seq_lengths
            for kind in ("kv", "full_kv", "q", "full_q"):
                blocks, others = (
                    _listed(getattr(mask, f"{kind}_num_blocks"), getattr(mask, f"{kind}_indices"))
                    for mask in (found, expected)
                )
                assert blocks == others, kind
            expected = extend_mask_for_draft_tokens(expected)


@pytest.mark.parametrize("window", [None, 5])
def test_dense_masks_are_speculators(trainer: Trainer, batch: Batch, window: int | None) -> None:
    trainer.model.sliding_window = window
    documents = batch["document_ids"][0]
    allowed = create_combined_mask_mod(documents, len(documents), sliding_window=window)
    expected = create_mask(allowed, None, None, len(documents), len(documents), device="cpu")
    for found in attention_masks(trainer.model, documents, STEPS):
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, expected)
        expected = extend_dense_mask_for_draft_tokens(expected, len(documents))


def test_probe_takes_the_first_way_that_works(trainer: Trainer, events: Events) -> None:
    works = trainer.forward

    def fails(_batch: Batch, _want_tokens: bool = False) -> Unrolled:
        raise RuntimeError("no compiler\nand much more")

    trainer.forwards = {"fused loss": fails, "eager loss": works, "the last": fails}  # type: ignore[dict-item]
    probe_step(trainer)
    assert trainer.forward is works
    assert events.of("log")[-2]["message"] == "fused loss does not work here (RuntimeError: no compiler)"
    trainer.forwards = {"fused loss": fails}  # type: ignore[dict-item]
    with pytest.raises(RuntimeError, match="no compiler"):
        probe_step(trainer)


def test_probe_does_not_hide_that_memory_is_short(trainer: Trainer) -> None:
    def exhausts(_batch: Batch, _want_tokens: bool = False) -> Unrolled:
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.forwards = {"fused loss": exhausts, "eager loss": trainer.forward}  # type: ignore[dict-item]
    with pytest.raises(TrainingError, match=r"does not fit the memory of cpu: CUDA out of memory; lower training\."):
        probe_step(trainer)
