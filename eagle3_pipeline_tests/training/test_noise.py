"""Noise is drawn from (seed, batch number) alone and has the size it says."""

from typing import Any

import pytest
import torch

from eagle3_pipeline.config import NoiseSpec
from eagle3_pipeline.training.noise import add_noise

STATES = torch.zeros(1, 200, 300)


@pytest.mark.parametrize("kind", ["gaussian", "uniform"])
def test_same_seed_and_batch_give_the_same_noise(kind: Any) -> None:
    noise = NoiseSpec(kind=kind, scale=0.1)
    first = add_noise(STATES, noise, 1, 2)
    torch.rand(5)
    assert torch.equal(first, add_noise(STATES, noise, 1, 2))
    assert not torch.equal(first, add_noise(STATES, noise, 1, 3))
    assert not torch.equal(first, add_noise(STATES, noise, 2, 2))


def test_sizes() -> None:
    gaussian = add_noise(STATES, NoiseSpec(kind="gaussian", scale=0.1), 0, 0)
    assert gaussian.std().item() == pytest.approx(0.1, rel=0.02)
    assert gaussian.abs().max() > 0.3
    uniform = add_noise(STATES, NoiseSpec(kind="uniform", scale=0.1), 0, 0)
    assert uniform.abs().max() <= 0.1
    assert uniform.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)
    assert uniform.mean().item() == pytest.approx(0, abs=0.002)


def test_none_is_the_same_tensor() -> None:
    assert add_noise(STATES, NoiseSpec(kind="none"), 0, 0) is STATES
    assert add_noise(STATES, NoiseSpec(scale=0.0), 0, 0) is STATES


def test_type_is_kept() -> None:
    assert add_noise(STATES.bfloat16(), NoiseSpec(), 0, 0).dtype == torch.bfloat16
