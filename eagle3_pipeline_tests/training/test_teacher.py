"""The teacher inside the draft's model: its targets are the verifier's logits, whatever their formula."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from speculators.models.eagle3 import Eagle3DraftModel

from eagle3_pipeline.config import DraftSpec, NoiseSpec, TrainingSpec
from eagle3_pipeline.training.acceptance import VerifierChoice
from eagle3_pipeline.training.dataset import Batch, PackedCollate
from eagle3_pipeline.training.draft_config import build_layer_config, read_verifier_config
from eagle3_pipeline.training.draft_model import VerifierWeights, VocabMap, build_draft, load_verifier_weights
from eagle3_pipeline.training.export import export_draft
from eagle3_pipeline.training.job import Job
from eagle3_pipeline.training.progress import only_supervised
from eagle3_pipeline.training.unroll import OwnForward, forwards
from eagle3_pipeline_tests.families.builders import make_family
from eagle3_pipeline_tests.families.static import reference

WANTED = torch.arange(3, 250, 4)


def _build(folder: Path) -> tuple[Eagle3DraftModel, VerifierWeights, VocabMap]:
    config = read_verifier_config(folder, False)
    weights = load_verifier_weights(folder, config)
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[WANTED] = True
    vocab_map = VocabMap(t2d, WANTED - torch.arange(len(WANTED)))
    draft = DraftSpec(head_dim=64, rope_theta=1e4)
    training = TrainingSpec(noise=NoiseSpec(kind="none"))
    job = Job("train", folder, str(folder), False, (2, 4, 5), draft, training, (), Path())
    return build_draft(job, build_layer_config(draft, config), config, weights, vocab_map), weights, vocab_map


@pytest.mark.parametrize("kind", ["qwen3", "granite", "gemma2", "phi", "cohere", "qwen3_next"])
def test_targets_choices_and_exports(kind: str, tmp_path: Path) -> None:
    folder = make_family(kind, tmp_path / kind)
    logits, states = reference(folder)
    model, weights, vocab_map = _build(folder)
    with torch.no_grad():
        targets = model.verifier_lm_head(model.verifier_norm(states[None]))[0].float()
    torch.testing.assert_close(targets, logits[:, WANTED], rtol=1e-3, atol=1e-3)
    choose = VerifierChoice(weights, model.verifier_norm, vocab_map.draft_ids, torch.device("cpu"))
    mask = torch.ones(1, len(states), dtype=torch.bool)
    chosen = choose({"loss_mask": mask, "verifier_last_hidden_states": states[None]})
    top = logits.topk(2).values
    # In bf16, as on a GPU: near-ties may fall otherwise.
    clear = (top[:, 0] - top[:, 1]) > 0.05 * (top[:, 0] - logits.mean(-1))
    assert torch.equal(chosen[clear], vocab_map.draft_ids[logits.argmax(-1)][clear])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not any(name.startswith("verifier_") for name in trained)
    export_draft(model, tmp_path / "export")
    with safe_open(tmp_path / "export" / "model.safetensors", framework="pt") as file:
        assert not [name for name in file.keys() if "verifier" in name]  # noqa: SIM118


def test_speculators_own_forward_takes_the_same_targets(tmp_path: Path) -> None:
    folder = make_family("gemma2", tmp_path / "gemma2")
    _, states = reference(folder)
    model = _build(folder)[0].float()
    n, hidden = states.shape
    sample = {
        "hidden_states": torch.randn(n, 3, hidden, generator=torch.Generator().manual_seed(0)),
        "verifier_last_hidden_states": states,
        "input_ids": torch.randint(3, 250, (n,), generator=torch.Generator().manual_seed(3)),
        "loss_mask": torch.ones(n, dtype=torch.bool),
        "lengths": torch.tensor([n]),
        "position_ids": torch.arange(n),
    }
    batch: Batch = PackedCollate(None)([sample])
    own = OwnForward(model, 2, 1.0)(batch).loss
    ours = forwards(model, 2, 1.0)["eager loss"](only_supervised(batch, 2, 1))
    torch.testing.assert_close(ours.loss, own, rtol=1e-3, atol=1e-5)
