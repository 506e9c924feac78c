"""A verifier's final norm and output layer as two torch modules: the only code that computes its logits.

A factor on the logits is folded into the gain and the biases, which are float32: what is left beside them is the kind
of norm and the cap. Only what already uses torch imports this module.
"""

from dataclasses import dataclass

import torch

from eagle3_pipeline.verifiers.formula import HeadFormula


@dataclass(frozen=True)
class HeadWeights:
    """What the modules are made of.

    Attributes:
        lm_head: [V, H] in the stored type.
        norm: float32 [H], the gain with its offset, times the scale of the logits.
        norm_bias: float32 [H], times the same; `None`: none.
        head_bias: float32 [V], times its own scale; `None`: none.
    """

    lm_head: torch.Tensor
    norm: torch.Tensor
    norm_bias: torch.Tensor | None
    head_bias: torch.Tensor | None


def fold(
    formula: HeadFormula,
    lm_head: torch.Tensor,
    norm: torch.Tensor | None,
    norm_bias: torch.Tensor | None,
    head_bias: torch.Tensor | None,
) -> HeadWeights:
    """Weights as the modules take them, from tensors as they are stored."""
    hidden_size = lm_head.shape[1]
    gain = torch.ones(hidden_size) if norm is None else norm.float() + formula.gain_offset
    scaled = formula.scale != 1.0
    return HeadWeights(
        lm_head=lm_head,
        norm=gain * formula.scale if scaled else gain,
        norm_bias=None if norm_bias is None else norm_bias.float() * formula.scale,
        head_bias=None if head_bias is None else head_bias.float() * formula.bias_scale,
    )


class FinalNorm(torch.nn.Module):
    """The norm before the output layer, in float32; the product with the gain in the wider of both types.

    Args:
        formula: kind and epsilon.
        weights: gain and bias.
    """

    def __init__(self, formula: HeadFormula, weights: HeadWeights) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weights.norm.clone(), requires_grad=False)
        # Speculators' draft leaves out `verifier_norm.weight` when it is saved; this would be saved.
        self.register_buffer("bias", weights.norm_bias, persistent=False)
        self.variance_epsilon = formula.eps
        self.centres = formula.norm == "layer"

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Normalised states [..., H], times the scale of the logits."""
        rows = states.float()
        if self.centres:
            rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        found = self.weight * rows.to(states.dtype)
        return found if self.bias is None else found + self.bias


class OutputLayer(torch.nn.Module):
    """Logits of normalised states.

    Args:
        formula: the cap.
        weight: [D, H], the rows that are wanted.
        bias: float32 [D].
    """

    def __init__(self, formula: HeadFormula, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("bias", bias, persistent=False)
        self.softcap = formula.softcap

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Logits [..., D]."""
        logits = torch.nn.functional.linear(states, self.weight)
        if self.bias is not None:
            logits = logits + self.bias
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
