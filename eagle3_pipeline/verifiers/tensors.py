"""The tensors of a verifier's head, found in the headers of its safetensors files: one rule for everybody."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_pipeline.errors import ConfigError
from eagle3_pipeline.store.shards import bf16_to_float32
from eagle3_pipeline.verifiers.ask import ask, read_json
from eagle3_pipeline.verifiers.formula import Asked

INDEX = "model.safetensors.index.json"
_FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_GENERIC = {"model", "language_model"}
# Names that other code than Transformers gives the same tensors.
_OTHER_NAMES = {
    "embedding": ("tok_embeddings.weight", "llm.embed.weight", "backbone.embeddings.weight"),
    "head": ("output.weight", "llm.unembed.weight", "embed_out.weight"),
    "norm": ("llm.norm.weight", "backbone.norm_f.weight", "norm.weight"),
}
_ROWS_COMPARED = 16


@dataclass(frozen=True)
class Tensor:
    """A tensor in a safetensors file.

    Attributes:
        name: its name.
        file: where it is.
        dtype: of safetensors' names.
        shape: its shape.
        offset: of its first byte in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def map(self) -> np.ndarray:
        """The stored values, memory-mapped; those of bfloat16 as uint16."""
        dtype = _FLOATS[self.dtype]
        return np.memmap(self.file, dtype=dtype, mode="r", offset=self.offset, shape=self.shape)

    def floats(self, rows: slice = slice(None)) -> np.ndarray:
        """Rows as float32."""
        values = np.asarray(self.map()[rows])
        return bf16_to_float32(values) if self.dtype == "BF16" else values.astype(np.float32)


@dataclass(frozen=True)
class HeadTensors:
    """The tensors that make logits, and the embeddings.

    Attributes:
        embedding: [V or more, H].
        head: [V or more, H]; the embeddings where both are one.
        norm: gain of the final norm [H]; `None`: the class has none.
        norm_bias: [H].
        head_bias: [V or more].
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor | None
    norm_bias: Tensor | None
    head_bias: Tensor | None


def weight_names(folder: Path) -> dict[str, str]:
    """File of each tensor: by the index, or by the headers of all files, as vLLM reads them.

    Files named `consolidated*` hold the same weights under other names (Mistral's) and do not count.

    Raises:
        ConfigError: there is no safetensors file, or it cannot be read.
    """
    if (folder / INDEX).exists():
        found = read_json(folder / INDEX).get("weight_map", {})
        return {str(name): str(file) for name, file in found.items()}
    return {name: path.name for path in weight_files(folder) for name in read_header(path)[0]}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that hold the weights.

    Raises:
        ConfigError: a file of the index is missing, or there is none at all.
    """
    if (folder / INDEX).exists():
        names = sorted({str(name) for name in read_json(folder / INDEX).get("weight_map", {}).values()})
        missing = [name for name in names if not (folder / name).exists()]
        if missing:
            listed = ", ".join(missing[:5])
            raise ConfigError(f"verifier.model: {folder} lacks {len(missing)} of {len(names)} weight files: {listed}")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    files = [path for path in files if not path.name.startswith("consolidated")] or files
    if not files:
        raise ConfigError(f"verifier.model: {folder} has no .safetensors weights")
    return files


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Tensors of a safetensors file by name, and where its values begin.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        found = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        for tensor in found.values():
            tensor["data_offsets"][1], tensor["dtype"], tensor["shape"]
    except (OSError, ValueError, OverflowError, MemoryError, AttributeError, LookupError, TypeError) as error:
        raise ConfigError(f"verifier.model: {path} is not a safetensors file: {error}") from error
    return found, 8 + length


def head_tensors(folder: Path, asked: Asked | None = None) -> HeadTensors:
    """Finds the tensors and checks their types and shapes.

    Args:
        folder: a verifier's.
        asked: what its class says; default: it is asked.

    Raises:
        ConfigError: one is missing, quantised, or of another shape than the config says.
    """
    asked = asked or ask(folder)
    reader = _Reader(folder)
    names, config = asked.names, asked.config
    table = [config["vocab_size"], config["hidden_size"]]
    embedding = reader.find("embedding", names.embedding, table)
    stored = reader.look("head", names.head)
    # Where only the config around the language model's ties them, vLLM takes what is stored.
    if asked.tied and (config.get("tie_word_embeddings") or stored is None) and not reader.quantised(names.head):
        head = embedding
    else:
        head = reader.find("head", names.head, table)
    norm = reader.find("norm", names.norm, table[1:]) if names.norm else None
    norm_bias = reader.find("", names.norm_bias, table[1:]) if names.norm_bias else None
    head_bias = reader.find("", names.head_bias, table[:1]) if names.head_bias else None
    return HeadTensors(embedding, head, norm, norm_bias, head_bias)


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = weight_names(folder)
        self._headers: dict[str, tuple[dict[str, Any], int]] = {}

    def look(self, kind: str, name: str) -> Tensor | None:
        """The tensor that the class calls `name`, whatever its prefix is here."""
        found = self._best(name)
        for other in _OTHER_NAMES.get(kind, ()):
            found = found or self._best(other)
        return self._read(found) if found else None

    def find(self, kind: str, name: str, shape: list[int]) -> Tensor:
        """The same.

        Raises:
            ConfigError: it is missing, quantised, or of another shape.
        """
        tensor, expected = self.look(kind, name), f"an unquantised {shape}"
        if tensor is None:
            other = self.quantised(name)
            described = f"stored as {', '.join(other[:3])}" if other else "missing"
            raise ConfigError(f"{self._folder}: the verifier's {name} is {described}, expected {expected}")
        scales = [one for one in self.quantised(name) if "scale" in one]
        # Tables may have more rows than the vocabulary: what no token reads is left out.
        fits = len(tensor.shape) == len(shape) and tensor.shape[0] >= shape[0] and list(tensor.shape[1:]) == shape[1:]
        fits = fits and (kind in ("embedding", "head") or list(tensor.shape) == shape)
        if tensor.dtype not in _FLOATS or not fits or scales:
            described = f"{tensor.dtype} {list(tensor.shape)}{f' with {scales[0]}' if scales else ''}"
            raise ConfigError(f"{self._folder}: the verifier's {tensor.name} is {described}, expected {expected}")
        return tensor

    def quantised(self, name: str) -> list[str]:
        """Names of what is stored beside or instead of a weight of this module: packed values, scales."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        found = [n for n in self._files if n.split(".")[-2:-1] == [module] and not _is_inner(n)]
        return sorted(n for n in found if n.rpartition(".")[2] not in ("weight", "bias"))

    def _best(self, name: str) -> str | None:
        """An exact name; else that of the most parts in common, the shortest of them."""
        if name in self._files:
            return name
        leaf = ".".join(name.split(".")[-2:])
        wanted = set(name.split(".")) | _GENERIC
        matches = [n for n in self._files if (n == leaf or n.endswith(f".{leaf}")) and not _is_inner(n)]
        return min(matches, key=lambda n: (-len(wanted & set(n.split("."))), len(n)), default=None)

    def _read(self, name: str) -> Tensor:
        path = self._folder / self._files[name]
        if path.name not in self._headers:
            self._headers[path.name] = read_header(path)
        header, start = self._headers[path.name]
        if name not in header:
            raise ConfigError(f"{path} has no tensor {name}, which {INDEX} says is there: fetch it again")
        found = header[name]
        return Tensor(name, path, found["dtype"], tuple(found["shape"]), start + found["data_offsets"][0])


def _is_inner(name: str) -> bool:
    """Whether a tensor belongs to a numbered layer."""
    return any(part.isdigit() for part in name.split("."))


def stored_beside(folder: Path, asked: Asked) -> bool:
    """Whether a tied output layer is stored as well, and is not the embeddings: vLLM takes those then."""
    if not (asked.tied and asked.config.get("tie_word_embeddings")):
        return False
    try:
        reader = _Reader(folder)
        embedding, head = reader.look("embedding", asked.names.embedding), reader.look("head", asked.names.head)
    except ConfigError:
        return False
    if embedding is None or head is None or {embedding.dtype, head.dtype} - _FLOATS.keys():
        return False
    num_rows = min(embedding.shape[0], head.shape[0])
    rows = np.unique(np.linspace(0, num_rows - 1, _ROWS_COMPARED).astype(int)).tolist()
    return any(not np.array_equal(embedding.floats(slice(i, i + 1)), head.floats(slice(i, i + 1))) for i in rows)
