"""Asks Transformers about a verifier's folder, once for every config; remembered beside the store.

Transformers loads torch, which neither the planner nor the code location needs: it is asked in a process of its own
where this one has not loaded it.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import project_home
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.verifiers.formula import Asked, HeadFormula, HeadNames

# Raised when what is asked, or how, changes: answers that are remembered count no longer.
_VERSION = 1
_TIMEOUT_S = 600.0
# Plain values under other names in a class than in its file, or that follow from other keys.
_NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "model_type",
    "tie_word_embeddings",
)
EPS_NAMES = (
    "rms_norm_eps",
    "norm_eps",
    "layer_norm_epsilon",
    "layer_norm_eps",
    "layernorm_epsilon",
    "norm_epsilon",
    "rms_norm_epsilon",
)
# Where the class cannot be asked, a config with one of these at another value than this is refused.
_UNKNOWN_SCALES: dict[str, Any] = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_layernorm_scale": None,
    "lm_head_multiplier": 1.0,
    "dim_model_base": None,
    "mup_width_multiplier": 1.0,
}
_PLUS_ONE_TYPES = ("gemma", "recurrent_gemma", "qwen3_next", "qwen3_5")
_PLAIN_GEMMAS = ("gemma3n", "gemma4")


def ask(folder: Path) -> Asked:
    """What the class of this folder's config says; the config as it is written where there is no such class.

    Code that comes with a model is not run.

    Raises:
        ConfigError: `config.json` cannot be read.
    """
    path = folder / "config.json"
    raw = read_json(path)
    written = json.dumps(raw, sort_keys=True)
    key = hashlib.sha256(f"{_VERSION} {_transformers_version()} {written}".encode()).hexdigest()[:32]
    return _answer(key, str(folder), written)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ConfigError: there is none.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"verifier.model: {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"verifier.model: {path} holds {type(value).__name__}, expected a JSON object")
    return value


@functools.lru_cache(maxsize=256)
def _answer(key: str, folder: str, written: str) -> Asked:
    raw = json.loads(written)
    if "model_type" not in raw:
        return _as_written(raw, "it names no model_type")
    if {"torch", "transformers"} <= sys.modules.keys():
        return answer(Path(folder))
    remembered = project_home() / "scratch" / "verifiers" / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return Asked.parse(json.loads(remembered.read_text()))
    command = [sys.executable, "-m", "eagle3_pipeline.verifiers.ask", folder]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRANSFORMERS_VERBOSITY": "error"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return _as_written(raw, f"Transformers cannot be asked: {error}")
    _remember(remembered, found)
    return Asked.parse(found)


def _remember(path: Path, found: dict[str, Any]) -> None:
    # A folder that cannot be written costs the time of the next question, no more.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(found, file)
        os.replace(name, path)


@functools.lru_cache(maxsize=1)
def _transformers_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def answer(folder: Path) -> Asked:
    """Asks in this process; imports Transformers and torch."""
    from transformers import AutoConfig

    from eagle3_pipeline.verifiers.measure import NotMeasuredError, build, head_names, is_tied, measure, named_config

    raw = read_json(folder / "config.json")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        text = getattr(config, "text_config", None) or config
        found, source = _plain(text), f"{type(text).__name__} of Transformers"
    except Exception as error:  # config classes raise anything
        reason = f"{type(error).__name__}: {first_line(error)}"
        written = _as_written(raw, reason)
        found, source = written.config, written.config_source
        # Of a model that brings its own config class, the model class may still be one of Transformers'.
        config = text = named_config(raw, found)
        if config is None:
            return written
    try:
        model = build(config, text)
    except NotMeasuredError as error:
        asked = _unmeasured(found, raw, source, str(error))
        # Transformers' class of this type is not known to have RMS norms.
        known = "rms_norm_eps" in found or source.startswith("config.json")
        return asked if known else replace(asked, formula=None, formula_source=str(error))
    try:
        names, tied, name = head_names(model), is_tied(model), type(model).__name__
        formula = measure(model, text)
    except NotMeasuredError as error:
        return replace(_unmeasured(found, raw, source, ""), formula=None, formula_source=str(error))
    return Asked(found, source, formula, f"measured on {name}", names, tied)


def first_line(error: BaseException) -> str:
    """Of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def _plain(text: Any) -> dict[str, Any]:
    """The config's values, by the names that its class gives them as well."""
    found = json.loads(json.dumps(text.to_dict(), default=str))
    for name in (*_NAMES, *getattr(text, "attribute_map", {})):
        with contextlib.suppress(Exception):  # a property may need what this config does not have
            value = getattr(text, name)
            if name not in found and isinstance(value, int | float | str):
                found[name] = value
    return found


def _as_written(raw: dict[str, Any], reason: str) -> Asked:
    """The answer where there is no class to ask: keys by their usual names."""
    nested = raw.get("text_config")
    text = nested if isinstance(nested, dict) else raw
    return _unmeasured(text, raw, f"config.json as it is written ({reason})", reason)


def _unmeasured(text: dict[str, Any], raw: dict[str, Any], source: str, reason: str) -> Asked:
    tied = bool(text.get("tie_word_embeddings", raw.get("tie_word_embeddings", False)))
    told = f"its class cannot be asked ({reason})"
    scaled = [f"{k} {text[k]}" for k, v in _UNKNOWN_SCALES.items() if text.get(k) not in (None, v)]
    eps = norm_eps(text)
    if scaled or eps is None:
        problem = f"its config scales logits by {', '.join(scaled)}" if scaled else "its config names no epsilon"
        return Asked(text, source, None, f"{told}, and {problem}", HeadNames(), tied)
    kind = str(text.get("model_type", ""))
    plus_one = kind.startswith(_PLUS_ONE_TYPES) and not kind.startswith(_PLAIN_GEMMAS)
    formula = HeadFormula("rms", 1.0 if plus_one else 0.0, eps)
    return Asked(text, source, formula, f"taken from its config: {told}", HeadNames(), tied)


def norm_eps(config: dict[str, Any]) -> float | None:
    """The epsilon of the norms, under whatever name the config has it."""
    return next((float(config[name]) for name in EPS_NAMES if isinstance(config.get(name), float | int)), None)


if __name__ == "__main__":
    print(json.dumps(asdict(answer(Path(sys.argv[1])))))
