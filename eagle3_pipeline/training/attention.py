"""Attention masks of training-time test.

At step i a position attends to what came before it in its document at step 0, and to itself at steps 1..i; keys of the
steps follow each other. Which pairs of tokens that is, is speculators' `create_combined_mask_mod`.
"""

from typing import Any

import torch
from speculators.models.attention import create_float_mask
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.attention import create_combined_mask_mod
from torch.nn.attention.flex_attention import BlockMask, create_mask

# Flex attention skips blocks of this many queries and keys.
BLOCK = 128
_PADDING = torch.iinfo(torch.int64).max


def attention_masks(
    model: Eagle3DraftModel, documents: torch.Tensor, steps: int
) -> list[torch.Tensor] | list[BlockMask]:
    """The mask of each step, for the attention that the draft was built with.

    Args:
        model: the draft.
        documents: [S], ascending, -1 for padding behind them.
        steps: of training-time test.
    """
    size, window = len(documents), model.sliding_window
    allowed = create_combined_mask_mod(documents, size, sliding_window=window)
    kind = model.config.transformer_layer_config._attn_implementation
    if kind == "simple_flex_attention":
        return _block_masks(*_blocks(documents, window), allowed, steps)
    create = create_float_mask if kind == "eager" else create_mask
    dense = create(allowed, None, None, size, steps * size, device=documents.device)
    return [dense[..., : (i + 1) * size] for i in range(steps)]


def _blocks(documents: torch.Tensor, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [S/BLOCK, S/BLOCK] each, queries by keys of step 0: blocks attended to in part, and those in full.

    That documents lie one after the other says it without a look at every pair of tokens.
    """
    ascending = torch.where(documents < 0, _PADDING, documents)
    first, last = ascending[::BLOCK], ascending[BLOCK - 1 :: BLOCK]
    number = torch.arange(len(first), device=documents.device)
    query, key = number[:, None], number
    some = (key < query) & (last == first[:, None]) & (last != _PADDING)
    every = (key < query) & (first == last[:, None]) & (first != _PADDING)
    if window is not None:
        some &= (query - key - 1) * BLOCK + 1 < window
        every &= (query - key + 1) * BLOCK - 1 < window
    return (some & ~every) | (key == query), every


def _block_masks(partly: torch.Tensor, fully: torch.Tensor, allowed: Any, steps: int) -> list[BlockMask]:
    """The masks of all steps: parts of the last one, whose blocks are listed in ascending order."""
    count = len(partly)
    own, none = torch.eye(count, dtype=torch.bool, device=partly.device), torch.zeros_like(partly)
    partly = torch.cat([partly] + [own] * (steps - 1), dim=1)
    fully = torch.cat([fully] + [none] * (steps - 1), dim=1)
    kv_num_blocks, kv_indices = _ordered(partly)
    full_kv_num_blocks, full_kv_indices = _ordered(fully)
    q_num_blocks, q_indices = _ordered(partly.T)
    full_q_num_blocks, full_q_indices = _ordered(fully.T)
    masks = []
    for step in range(steps):
        keys = (step + 1) * count
        masks.append(
            BlockMask(
                seq_lengths=(BLOCK * count, BLOCK * keys),
                kv_num_blocks=kv_num_blocks - (steps - 1 - step),
                kv_indices=kv_indices[..., :keys].contiguous(),
                full_kv_num_blocks=full_kv_num_blocks,
                full_kv_indices=full_kv_indices[..., :keys].contiguous(),
                q_num_blocks=q_num_blocks[..., :keys],
                q_indices=q_indices[..., :keys, :],
                full_q_num_blocks=full_q_num_blocks[..., :keys],
                full_q_indices=full_q_indices[..., :keys, :],
                BLOCK_SIZE=(BLOCK, BLOCK),
                mask_mod=allowed,
            )
        )
    return masks


def _ordered(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row how many blocks are set, and the numbers of these first; int32 [1, 1, rows], [1, 1, rows, all]."""
    numbers = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True)
    return blocks.sum(1, dtype=torch.int32)[None, None], numbers.to(torch.int32).contiguous()[None, None]
