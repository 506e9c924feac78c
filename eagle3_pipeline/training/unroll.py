"""The draft's steps of training-time test, on the layers of speculators' `Eagle3DraftModel`.

The results are those of the model's own `forward`. That one does not compile: a graph break that speculators asks for
lies in its loop, so that the compiler gives up on the loop, and metrics that nobody reads here wait for the device in
every step. Here the loop is plain code that never waits, what gains by it is compiled on its own, and the output layers
are computed where there is a target that counts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from speculators.losses import kl_div_loss as fused_loss
from speculators.losses import loss_function, resolve_loss_config
from speculators.losses.eager import kl_div_loss as eager_loss
from speculators.models.eagle3 import Eagle3DraftModel
from torch.nn.functional import pad
from transformers import DynamicCache

from eagle3_pipeline.training.attention import attention_masks
from eagle3_pipeline.training.dataset import Batch

PositionLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Unrolled:
    """What the steps give.

    Attributes:
        loss: the weighted sum of the steps' losses, to differentiate.
        losses: float64 [1 + steps], its value and that of each step, on the device.
        draft_tokens: of each step, draft ids [1, S], if they were asked for and every position is a target.
    """

    loss: torch.Tensor
    losses: torch.Tensor
    draft_tokens: list[torch.Tensor]


class Unroll:
    """Runs the steps of a draft.

    Args:
        model: the draft, on its device.
        steps: of training-time test.
        decay: the weight of step i is `decay`**i.
        position_loss: loss [1, S] of logits and target logits [1, S, D].
        compiles: whether layers and norms are compiled (flex attention needs it).
    """

    def __init__(
        self, model: Eagle3DraftModel, steps: int, decay: float, position_loss: PositionLoss, compiles: bool
    ) -> None:
        self.model, self.steps, self.decay, self.position_loss = model, steps, decay, position_loss
        compiled: Callable[[Any], Any] = _compile if compiles else _as_it_is
        if compiles:
            # Each step has as many keys as none before it, with gradients and without; past the limit attention would
            # run uncompiled, on scores of every pair of tokens.
            variants = 4 * steps
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, variants)
        self._layers = [compiled(layer) for layer in model.layers]
        self._norm, self._verifier_norm = compiled(model.norm), compiled(model.verifier_norm)
        self._input_norm = _as_it_is if model.input_norm is None else compiled(model.input_norm)

    def __call__(self, batch: Batch, want_tokens: bool = False) -> Unrolled:
        """The steps on a batch on the device, with `targets` and `weights` (`only_supervised`)."""
        model, ids, positions = self.model, batch["input_ids"], batch["targets"]
        with torch.no_grad():
            states = self._verifier_norm(batch["verifier_last_hidden_states"])
            wanted = model.verifier_lm_head(states.index_select(1, positions))
        hidden = model.fc(self._input_norm(batch["hidden_states"]))
        cache = DynamicCache()
        losses, draft_tokens = [], []
        for step, attended in enumerate(attention_masks(model, batch["document_ids"][0], self.steps)):
            with torch.no_grad():
                # Teacher forcing: the tokens that come `step` later; the last positions have none, and no target.
                embedded = model.embed_tokens(pad(ids[:, step:], (0, step)))
            hidden = torch.cat([embedded, hidden], dim=-1)
            position_ids = batch["position_ids"] + step
            rotary = model.rotary_emb(hidden, position_ids)
            for layer in self._layers:
                hidden = layer(
                    hidden,
                    attention_mask=attended,
                    position_ids=position_ids,
                    past_key_values=cache,
                    position_embeddings=rotary,
                )
            rows = (positions - step).clamp(min=0)
            logits = model.lm_head(self._norm(hidden).index_select(1, rows))
            weights = batch["weights"][None]
            losses.append(loss_function(logits, wanted, weights, rows[None], self.position_loss) * self.decay**step)
            if want_tokens:
                draft_tokens.append(pad(logits.detach().argmax(dim=-1)[:, step:], (0, step)))
        loss = reduce(torch.add, losses)
        return Unrolled(loss, torch.stack([loss, *losses]).detach().double(), draft_tokens)


class OwnForward:
    """The same by the model's own `forward`: what is left where the loop's parts do not compile."""

    def __init__(self, model: Eagle3DraftModel, steps: int, decay: float) -> None:
        self.model, self.steps, self.decay = model, steps, decay

    def __call__(self, batch: Batch, want_tokens: bool = False) -> Unrolled:
        """The steps on a batch on the device."""
        draft_tokens, loss, metrics = self.model(
            **{name: value for name, value in batch.items() if name not in ("targets", "weights")},
            ttt_steps=self.steps,
            ttt_step_loss_decay=self.decay,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        losses = [loss, *(metrics[f"loss_{i}_sum"] for i in range(self.steps))]
        return Unrolled(loss, torch.stack(losses).detach().double(), draft_tokens if want_tokens else [])


Forward = Unroll | OwnForward


def forwards(model: Eagle3DraftModel, steps: int, decay: float) -> dict[str, Forward]:
    """By name, the fastest first; on the CPU the only one."""
    compiles = model.device.type == "cuda"
    found: dict[str, Forward] = {}
    if compiles:
        found["fused loss"] = Unroll(model, steps, decay, fused_loss, compiles)
    found["eager loss"] = Unroll(model, steps, decay, eager_loss, compiles)
    if compiles:
        found["speculators' own forward"] = OwnForward(model, steps, decay)
    return found


# Attention on one shape is faster than on any.
_compile = partial(torch.compile, dynamic=False)


def _as_it_is(part: Any) -> Any:
    return part
