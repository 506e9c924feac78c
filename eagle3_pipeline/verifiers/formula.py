"""How a verifier makes logits of its last layer's output: the one description that every user of its head shares."""

from dataclasses import asdict, dataclass
from typing import Any

_DIGITS = 6


@dataclass(frozen=True)
class HeadFormula:
    """logits = cap(scale * lm_head @ n(x) + bias_scale * bias), with n the final norm and cap(z) = c * tanh(z / c).

    Attributes:
        norm: "rms": x / sqrt(mean(x^2) + eps), "layer": (x - mean(x)) / sqrt(var(x) + eps); times the gain.
        gain_offset: what is added to the stored gain: 1.0 where a class stores it less one, as Gemma's do.
        eps: epsilon of the norm.
        scale: factor on the logits.
        bias_scale: factor on the output layer's bias, where it has one.
        softcap: c; `None`: logits are not capped.
    """

    norm: str
    gain_offset: float
    eps: float
    scale: float = 1.0
    bias_scale: float = 1.0
    softcap: float | None = None

    def rounded(self) -> dict[str, Any]:
        """The attributes with six significant digits, ready for a fingerprint."""
        return {k: float(f"{v:.{_DIGITS}g}") if isinstance(v, float) else v for k, v in asdict(self).items()}


@dataclass(frozen=True)
class HeadNames:
    """Where the class keeps its parameters; a checkpoint may prefix them otherwise.

    Attributes:
        embedding: name of the embeddings' weight.
        norm: name of the final norm's gain; empty: the class has none.
        norm_bias: name of the final norm's bias; empty: none.
        head: name of the output layer's weight.
        head_bias: name of the output layer's bias; empty: none.
    """

    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    norm_bias: str = ""
    head: str = "lm_head.weight"
    head_bias: str = ""


@dataclass(frozen=True)
class Asked:
    """What a verifier's class says.

    Attributes:
        config: the language model's config as its class reads it; JSON values.
        config_source: the config class, or why `config.json` is taken as it is.
        formula: how logits are made; `None`: in a way that is not known.
        formula_source: what was measured, or why nothing could be.
        names: where the parameters are.
        tied: whether the output layer is the embeddings.
    """

    config: dict[str, Any]
    config_source: str
    formula: HeadFormula | None
    formula_source: str
    names: HeadNames
    tied: bool

    @classmethod
    def parse(cls, found: dict[str, Any]) -> "Asked":
        """The opposite of `asdict`."""
        formula = found["formula"]
        return cls(**{**found, "formula": formula and HeadFormula(**formula), "names": HeadNames(**found["names"])})
