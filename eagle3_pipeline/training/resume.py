"""Resume states: everything a killed run needs to go on as if nothing had happened.

`resume/state.pt` is replaced atomically; `resume/best-<epoch>.pt` holds the trained weights of the best epoch that it
names. Optimizer state keeps its own type. Both are what `torch.save` writes: archives with a checksum of each member.
"""

import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import torch

from eagle3_pipeline.store.atomic import fsync_path, storage_error

FOLDER_NAME = "resume"
_STATE_NAME = "state.pt"
_FORMAT = 2
# What reading a file of anything may raise.
_UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
)


class ResumeStore:
    """The resume folder of one output folder."""

    def __init__(self, output: Path, fingerprint: str) -> None:
        self._folder = output / FOLDER_NAME
        self._fingerprint = fingerprint

    def load(self) -> dict[str, Any] | None:
        """The last state of this fingerprint; None if there is none that can be read."""
        try:
            state = _load(self._folder / _STATE_NAME)
            if not isinstance(state, dict) or (state["format"], state["fingerprint"]) != (_FORMAT, self._fingerprint):
                return None
            if best := state["progress"]["best_epoch"]:
                _require_whole(self._best_path(best))
        except _UNREADABLE:
            return None
        return state

    def is_there(self) -> bool:
        """Whether there is a state, of whatever fingerprint and in whatever condition."""
        return (self._folder / _STATE_NAME).exists()

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state, then drops weights of epochs that are no longer the best."""
        state = {"format": _FORMAT, "fingerprint": self._fingerprint, **state}
        self._replace(self._folder / _STATE_NAME, state)
        kept = self._best_path(state["progress"]["best_epoch"])
        for path in self._folder.glob("best-*.pt"):
            if path != kept:
                path.unlink()

    def save_best(self, epoch: int, weights: dict[str, torch.Tensor]) -> None:
        """Keeps the trained weights of an epoch; `save` with that epoch as the best makes them count."""
        self._replace(self._best_path(epoch), weights)

    def load_best(self, epoch: int) -> dict[str, torch.Tensor]:
        """Trained weights of the best epoch."""
        found: dict[str, torch.Tensor] = _load(self._best_path(epoch))
        return found

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _best_path(self, epoch: int) -> Path:
        return self._folder / f"best-{epoch:04d}.pt"

    def _replace(self, path: Path, value: Any) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Through a file object a full disk is an OSError with its errno.
            with temporary.open("wb") as file:
                torch.save(value, file)
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise storage_error(error, path) from error


def _require_whole(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{path}: {damaged} is damaged")


def _load(path: Path) -> Any:
    _require_whole(path)
    return torch.load(path, map_location="cpu", weights_only=True)
