"""Measures how a class of Transformers makes logits, on its own norm and its own forward. Imports torch.

The model is built without memory (on the meta device). Only its final norm is given values, and its body is replaced by
one that returns what it is told: so neither layers nor weights are needed, and any factor, cap or bias that the class
puts around its output layer shows, under whatever key of the config it stands.
"""

import copy
import math
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from eagle3_pipeline.verifiers.ask import first_line
from eagle3_pipeline.verifiers.formula import HeadFormula, HeadNames

_LOGITS = (1e-3, -1e-3, 0.01, 0.1, -1.0, 10.0, 100.0, -1e3, 1e8)
_TOLERANCE = 1e-4
_ROWS = 4


class NotMeasuredError(Exception):
    """The class cannot be built, or what it does is not a formula that is known."""


class _Body(torch.nn.Module):
    """Stands for the whole model below the output layer; other attributes are those of the body that it replaces."""

    def __init__(self, states: torch.Tensor, replaced: torch.nn.Module) -> None:
        super().__init__()
        self.states = states
        self.__dict__["_replaced"] = replaced

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_replaced"], name)

    def forward(self, *_args: Any, **_kwargs: Any) -> "_Output":
        return _Output(self.states)


class _Output:
    """What a body returns: its states are the first element, everything else is none."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def build(config: PretrainedConfig, text: PretrainedConfig) -> PreTrainedModel:
    """The model that vLLM is to load, without memory: the class that `architectures` names, else that of the config.

    Raises:
        NotMeasuredError: Transformers has no such class, or it cannot be built.
    """
    reasons = []
    for chosen, own in _candidates(config, text):
        try:
            with torch.device("meta"):
                model = chosen(copy.deepcopy(own))
            if model.get_output_embeddings() is not None:
                return model
            reasons.append(f"{chosen.__name__} has no output layer")
        except Exception as error:  # a class may raise anything about a config that is not its own
            reasons.append(f"{chosen.__name__}: {type(error).__name__}: {first_line(error)}")
    raise NotMeasuredError("; ".join(reasons) or "Transformers has no class for it")


def named_config(raw: dict[str, Any], text: dict[str, Any]) -> PretrainedConfig | None:
    """The config as the class reads it that `architectures` names, inner before outer; `None`: no such class."""
    for name in [*(text.get("architectures") or []), *(raw.get("architectures") or [])]:
        wanted: Any = getattr(getattr(transformers, name, None), "config_class", None)
        if hasattr(wanted, "from_dict"):
            try:
                config = wanted.from_dict({k: v for k, v in text.items() if k != "auto_map"})
            except Exception:  # what this class cannot read is not its config
                continue
            config.architectures = [name]
            return config
    return None


def _candidates(config: PretrainedConfig, text: PretrainedConfig) -> list[tuple[Any, PretrainedConfig]]:
    found: list[tuple[Any, PretrainedConfig]] = []
    for name in [*(config.architectures or []), *(text.architectures or [])]:
        chosen = getattr(transformers, name, None)
        wanted: Any = getattr(chosen, "config_class", None)
        if not hasattr(wanted, "from_dict"):
            continue
        own = next((c for c in (config, text) if isinstance(c, wanted)), None)
        # A config class that came with the model, for a model class of Transformers.
        found.append((chosen, own or wanted.from_dict(text.to_dict())))
    # A wrapper around a language model comes first: it may make logits, and tie weights, in its own way.
    wrapper = [] if config is text else [(transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, config)]
    for mapping, own in (*wrapper, (transformers.MODEL_FOR_CAUSAL_LM_MAPPING, text)):
        chosen = mapping.get(type(own), None)
        if isinstance(chosen, tuple):
            chosen = chosen[0]
        if chosen is not None and all(chosen is not one for one, _ in found):
            found.append((chosen, own))
    return found


def final_norm(model: PreTrainedModel) -> tuple[str, torch.nn.Module]:
    """Name and module of the norm behind the last layer: the first one that the decoder defines after its layers.

    Raises:
        NotMeasuredError: there is none.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for decoder in _decoders(model):
        behind = False
        for child in decoder.children():
            if isinstance(child, torch.nn.ModuleList):
                behind = True
            elif behind and "norm" in type(child).__name__.lower():
                return names[id(child)], child
    raise NotMeasuredError(f"{type(model).__name__} has no norm behind its layers")


def _decoders(model: PreTrainedModel) -> list[torch.nn.Module]:
    body = model.base_model
    bodies = [body, getattr(model, "model", None)]
    inner = [getattr(one, name, None) for one in bodies for name in ("language_model", "text_model", "decoder")]
    nested = [getattr(one, name, None) for one in inner if one is not None for name in ("model", "decoder")]
    try:
        asked = [model.get_decoder()]
    except (AttributeError, NotImplementedError):
        asked = []
    return [one for one in (*asked, *nested, *inner, *bodies) if isinstance(one, torch.nn.Module)]


def head_names(model: PreTrainedModel) -> HeadNames:
    """The parameters' names in the class."""
    names = {id(module): name for name, module in model.named_modules()}
    norm_name, norm = final_norm(model)
    head = model.get_output_embeddings()
    head_name = names[id(head)]
    return HeadNames(
        embedding=f"{names[id(model.get_input_embeddings())]}.weight",
        norm=f"{norm_name}.weight" if _parameter(norm, "weight") is not None else "",
        norm_bias=f"{norm_name}.bias" if _parameter(norm, "bias") is not None else "",
        head=f"{head_name}.weight",
        head_bias=f"{head_name}.bias" if _parameter(head, "bias") is not None else "",
    )


def is_tied(model: PreTrainedModel) -> bool:
    """Whether the class makes its output layer of its embeddings."""
    model.tie_weights()
    return bool(model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def measure(model: PreTrainedModel, text: PretrainedConfig) -> HeadFormula:
    """The formula of this model's logits; the model is of no use afterwards.

    Raises:
        NotMeasuredError: its norm or its logits follow no formula that is known.
    """
    hidden_size = int(text.hidden_size)
    kind, offset, eps = _measure_norm(final_norm(model)[1], hidden_size, _epsilons(text))
    scale, bias_scale, softcap = _measure_logits(model, hidden_size)
    return HeadFormula(kind, offset, eps, scale, bias_scale, softcap)


def _epsilons(text: PretrainedConfig) -> list[float]:
    return [v for k, v in text.to_dict().items() if ("eps" in k.lower()) and isinstance(v, float)]


def _parameter(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    value = getattr(module, name, None)
    return value if isinstance(value, torch.nn.Parameter) else None


@torch.no_grad()
def _measure_norm(norm: torch.nn.Module, size: int, known: list[float]) -> tuple[str, float, float]:
    norm = norm.to_empty(device="cpu").float().eval()
    weight, bias = _parameter(norm, "weight"), _parameter(norm, "bias")
    others = {name for name, _ in norm.named_parameters()} - {"weight", "bias"}
    if others:
        raise NotMeasuredError(f"{type(norm).__name__} has the parameters {sorted(others)}")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_ROWS, size, generator=generator) + 0.5
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.zero_()
    offset = 1.0 if weight is not None and bool(_call(norm, rows).abs().max() > _TOLERANCE) else 0.0
    if weight is not None:
        weight.fill_(1.0 - offset)
    kinds = {"rms": _rms, "layer": _layer}
    unit = _call(norm, rows)
    kind = next((k for k, f in kinds.items() if torch.allclose(f(rows, 1e-6), unit, atol=5e-3, rtol=5e-3)), None)
    if kind is None:
        raise NotMeasuredError(f"{type(norm).__name__} is neither an RMS norm nor a layer norm")
    eps = _measure_eps(norm, rows[:1] - rows[:1].mean(), known)
    for parameter in (weight, bias):
        if parameter is not None:
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    expected = kinds[kind](rows, eps)
    expected = expected if weight is None else expected * (weight + offset)
    expected = expected if bias is None else expected + bias
    if not torch.allclose(_call(norm, rows), expected, rtol=_TOLERANCE, atol=_TOLERANCE):
        raise NotMeasuredError(f"{type(norm).__name__} does not apply its gain as a factor")
    return kind, offset, eps


def _call(norm: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    found = norm(rows[None])
    return (found[0] if isinstance(found, torch.Tensor) else found[0][0]).float()


def _rms(rows: torch.Tensor, eps: float) -> torch.Tensor:
    return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)


def _layer(rows: torch.Tensor, eps: float) -> torch.Tensor:
    return _rms(rows - rows.mean(-1, keepdim=True), eps)


def _measure_eps(norm: torch.nn.Module, row: torch.Tensor, known: list[float]) -> float:
    """From how much smaller a small row comes out: size / sqrt(size^2 + eps)."""
    row = row / row.square().mean().sqrt()
    size, eps = 1e-3, 0.0
    for _ in range(4):
        ratio = float(_call(norm, row * size).square().mean().sqrt())
        eps = max(size**2 / ratio**2 - size**2, 0.0) if ratio else math.inf
        size = min(max(math.sqrt(eps), 1e-7), 1.0)
    close = [value for value in known if abs(value - eps) <= 1e-2 * value]
    return close[0] if close else float(f"{eps:.3g}")


@torch.no_grad()
def _measure_logits(model: PreTrainedModel, hidden_size: int) -> tuple[float, float, float | None]:
    """Scale, scale of the bias, and cap: the class's own forward on states whose products are `_LOGITS`."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    if "." in name:
        # A wrapper around a whole language model, whose forward is measured.
        owner, _, name = name.rpartition(".")
        model = model.get_submodule(owner)
    has_bias = _parameter(head, "bias") is not None
    small = torch.nn.Linear(hidden_size, len(_LOGITS), bias=has_bias, dtype=torch.float64)
    products = torch.tensor(_LOGITS, dtype=torch.float64)
    states = torch.zeros(1, 1, hidden_size, dtype=torch.float64)
    states[..., 0] = 1.0
    body_name = final_norm(model)[0].partition(".")[0]
    setattr(model, name, small)
    setattr(model, body_name, _Body(states, getattr(model, body_name)))
    model.eval()

    def forward(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        small.weight.zero_()
        small.weight[:, 0] = weight
        if has_bias:
            small.bias.copy_(bias)
        found = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits
        return found.reshape(-1).double()

    zero = torch.zeros_like(products)
    try:
        plain = forward(products, zero)
        biased = forward(zero, products) if has_bias else plain
    except Exception as error:  # the class's own code: whatever it raises, nothing was measured
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise NotMeasuredError(f"the forward of {type(model).__name__} does not run alone: {reason}") from error
    scale, bias_scale = _slope(plain), _slope(biased) if has_bias else 1.0
    largest = abs(float(plain[-1]))
    softcap = None if largest > 0.5 * abs(scale) * _LOGITS[-1] else _digits(largest)
    for found, factor in ((plain, scale), (biased, bias_scale)) if has_bias else ((plain, scale),):
        expected = products * factor
        expected = expected if softcap is None else softcap * torch.tanh(expected / softcap)
        if not torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE * abs(factor) * abs(_LOGITS[0])):
            raise NotMeasuredError(f"the logits of {type(model).__name__} are no scaled and capped product")
    return scale, bias_scale, softcap


def _slope(found: torch.Tensor) -> float:
    slope = _digits(float(found[0]) / _LOGITS[0])
    if not slope:
        raise NotMeasuredError("the logits do not depend on the states")
    return slope


def _digits(value: float) -> float:
    """What float32 is good for; the cube of a small logit is lost in a cap."""
    return float(f"{value:.6g}")
