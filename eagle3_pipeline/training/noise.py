"""Noise on the aux hidden states: makes the draft robust to the features it will meet when it drafts on its own.

The idea and the size are EAGLE's (Li et al., 2024, section 4: uniform noise on the features).
"""

import hashlib

import torch

from eagle3_pipeline.config import NoiseSpec


def add_noise(states: torch.Tensor, noise: NoiseSpec, seed: int, batch_number: int) -> torch.Tensor:
    """Adds noise that depends on (seed, batch number) only, so that a resumed run draws the same.

    Args:
        states: aux hidden states [1, S, A*H].
        noise: kind and scale.
        seed: the training seed.
        batch_number: packed batches trained on before this one, over all epochs.

    Returns:
        A new tensor of the same shape and dtype; `states` itself if there is no noise.
    """
    if noise.kind == "none" or noise.scale == 0:
        return states
    digest = hashlib.sha256(f"{seed}:{batch_number}".encode()).digest()
    generator = torch.Generator(device=states.device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    drawn = torch.empty(states.shape, dtype=torch.float32, device=states.device)
    if noise.kind == "gaussian":
        drawn.normal_(0.0, noise.scale, generator=generator)
    else:
        drawn.uniform_(-noise.scale, noise.scale, generator=generator)
    return (states.float() + drawn).to(states.dtype)
