"""Resolves the verifier: local folder, geometry from its config, content identity."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eagle3_pipeline.config import CaptureSpec, VerifierSpec, expand
from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.shards import Geometry
from eagle3_pipeline.verifiers.ask import ask, read_json
from eagle3_pipeline.verifiers.sizes import has_experts, has_recurrent_layers, length_switches, max_positions
from eagle3_pipeline.verifiers.tensors import read_header, weight_files

_WHOLE_FILE_BYTES = 64 * 2**20
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 16
_IDENTITY_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".py", ".txt", ".tiktoken")
# Folders of other formats, and Mistral's own files of the same weights.
_NOT_FETCHED = ("*/*", "consolidated*")


@dataclass(frozen=True)
class Verifier:
    """A verifier on this machine's disk.

    Attributes:
        path: model folder.
        content_id: identity of its files' content.
        num_layers: n; the id of the last layer's output.
        hidden_size: H.
        vocab_size: V.
        max_positions: longest sequence in tokens.
        weight_bytes: bytes of all weight files.
        kv_bytes_per_token: bytes of a token in the attention cache of all layers, at 2 bytes a value.
        architecture: class name from the config.
        has_experts: whether tokens are sent to experts, by scores that rounding can turn over.
        has_recurrent_layers: whether layers carry a state from token to token.
        length_switches: what an engine computes otherwise if its length is larger, by name.
    """

    path: str
    content_id: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    weight_bytes: int
    kv_bytes_per_token: int
    architecture: str
    has_experts: bool = False
    has_recurrent_layers: bool = False
    length_switches: Mapping[str, int] = field(default_factory=dict)

    def engine_length(self, longest: int) -> int:
        """Length of all engines for sequences of at most `longest` tokens.

        One position more than that, where there is one: a draft proposes beyond the last token. But not so many that
        the engine computes otherwise than it need.
        """
        limits = [limit for limit in (self.max_positions, *self.length_switches.values()) if limit >= longest]
        return min([longest + 1, *limits])

    def switched_on(self, longest: int) -> list[str]:
        """Which of `length_switches` engines for sequences of at most `longest` tokens have on."""
        return sorted(name for name, limit in self.length_switches.items() if self.engine_length(longest) > limit)

    @property
    def default_aux_layer_ids(self) -> list[int]:
        """What `capture.aux_layer_ids` is where it is null; too small a verifier has no such layers."""
        return [2, self.num_layers // 2, self.num_layers - 3]

    def geometry(self, capture: CaptureSpec) -> Geometry:
        """Layers to capture: the aux layers in ascending order, then the last layer before the final norm.

        Raises:
            ConfigError: a layer id is out of range or given twice.
        """
        n = self.num_layers
        ids = capture.aux_layer_ids or self.default_aux_layer_ids
        if sorted(set(ids)) != sorted(ids) or not all(0 < i < n for i in ids):
            raise ConfigError(
                f"capture.aux_layer_ids {ids}: expected three different ids from 1 to {n - 1}; the verifier has "
                f"{n} layers and id {n} (its last layer's output) is always captured"
            )
        return Geometry((*sorted(ids), n), self.hidden_size)

    def facts(self) -> dict[str, Any]:
        """All attributes, for a manifest."""
        return asdict(self)


def resolve_verifier(spec: VerifierSpec, offline: bool = False) -> Verifier:
    """Finds the verifier's folder, checks that it is whole, reads its config.

    Args:
        spec: where it lies.
        offline: do not fetch a Hugging Face id that is not on this machine yet.

    Raises:
        ConfigError: the folder or a file of it is missing or unreadable.
    """
    return _inspect(_locate(spec, offline))


def is_local(spec: VerifierSpec) -> bool:
    """Whether `verifier.model` names a folder rather than a Hugging Face id."""
    path = Path(expand(spec.model)).expanduser()
    return path.is_dir() or path.is_absolute() or spec.model.startswith((".", "~", "${"))


def _locate(spec: VerifierSpec, offline: bool) -> Path:
    path = Path(expand(spec.model)).expanduser()
    if is_local(spec):
        if not path.is_dir():
            raise ConfigError(f"verifier.model: there is no folder {path}")
        return path.absolute()
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                spec.model,
                revision=spec.revision,
                local_files_only=offline,
                allow_patterns=[f"*{suffix}" for suffix in _IDENTITY_SUFFIXES],
                ignore_patterns=list(_NOT_FETCHED),
            )
        )
    except Exception as error:  # the hub client raises many types; all mean that the model cannot be had
        if offline:
            raise ConfigError(
                f"verifier.model: {spec.model!r} is not in this machine's Hugging Face cache; the first run fetches it"
            ) from error
        raise ConfigError(f"verifier.model: cannot get {spec.model!r} from the Hugging Face hub: {error}") from error


def _inspect(folder: Path) -> Verifier:
    asked = ask(folder)
    config, architectures = asked.config, read_json(folder / "config.json").get("architectures")
    missing = [k for k in ("num_hidden_layers", "hidden_size", "vocab_size") if not isinstance(config.get(k), int)]
    if missing:
        raise ConfigError(f"{folder / 'config.json'} lacks {', '.join(missing)}")
    weights = weight_files(folder)
    for path in weights:
        _check_safetensors(path)
    return Verifier(
        path=str(folder),
        content_id=_content_id(folder),
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        max_positions=max_positions(config),
        weight_bytes=sum(path.stat().st_size for path in weights),
        kv_bytes_per_token=_kv_bytes_per_token(config),
        architecture=(architectures or ["unknown"])[0],
        has_experts=has_experts(config),
        has_recurrent_layers=has_recurrent_layers(config),
        length_switches=length_switches(config),
    )


def _kv_bytes_per_token(config: dict[str, Any]) -> int:
    if config.get("kv_lora_rank"):
        # Multi-head latent attention caches one compressed vector and the rotary part of the key.
        values = config["kv_lora_rank"] + (config.get("qk_rope_head_dim") or 0)
    else:
        heads = config.get("num_attention_heads") or 1
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        values = 2 * (config.get("num_key_value_heads") or heads) * head_dim
    return 2 * values * config["num_hidden_layers"]


def generation_eos_ids(folder: str) -> list[int]:
    """Tokens that end an answer by the model's `generation_config.json`, where vLLM takes them from, too."""
    path = Path(folder) / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.exists() else None
    return found if isinstance(found, list) else [] if found is None else [found]


def _check_safetensors(path: Path) -> None:
    """A safetensors file is exactly as long as its header says; a half-written download is not."""
    header, start = read_header(path)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    expected, found = start + end, path.stat().st_size
    if expected != found:
        raise ConfigError(f"verifier.model: {path} has {found:,} bytes, its header says {expected:,}: fetch it again")


def _content_id(folder: Path) -> str:
    files = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in _IDENTITY_SUFFIXES)
    return digest({p.name: _file_id(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files})


@functools.lru_cache(maxsize=4096)
def _file_id(path: str, size: int, _mtime_ns: int) -> str:
    """Hash of a file: all of it up to 64 MiB, else its size and 17 evenly spaced samples of 1 MiB."""
    hasher = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            hasher.update(file.read())
        else:
            for k in range(_NUM_SAMPLES + 1):
                file.seek((size - _SAMPLE_BYTES) * k // _NUM_SAMPLES)
                hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()
