"""Resume states: everything a killed run needs to go on as if nothing had happened.

`resume/state.pt` is replaced atomically; `resume/best-<epoch>.safetensors` holds the trained weights of the best epoch
that it names. Optimizer state keeps its own type.
"""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from eagle3_pipeline.store.atomic import fsync_path, storage_error

FOLDER_NAME = "resume"
_STATE_NAME = "state.pt"
_FORMAT = 1


class ResumeStore:
    """The resume folder of one output folder."""

    def __init__(self, output: Path, fingerprint: str) -> None:
        self._folder = output / FOLDER_NAME
        self._fingerprint = fingerprint

    def load(self) -> dict[str, Any] | None:
        """The last state of this fingerprint; None if there is none that can be read."""
        path = self._folder / _STATE_NAME
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
            return None
        if not isinstance(state, dict) or (state.get("format"), state.get("fingerprint")) != (
            _FORMAT,
            self._fingerprint,
        ):
            return None
        best = state["progress"]["best_epoch"]
        return state if not best or self._best_path(best).exists() else None

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the state, then drops weights of epochs that are no longer the best."""
        state = {"format": _FORMAT, "fingerprint": self._fingerprint, **state}

        def write(path: Path) -> None:
            # Through a file object a full disk is an OSError with its errno.
            with path.open("wb") as file:
                torch.save(state, file)

        self._replace(self._folder / _STATE_NAME, write)
        kept = self._best_path(state["progress"]["best_epoch"])
        for path in self._folder.glob("best-*.safetensors"):
            if path != kept:
                path.unlink()

    def save_best(self, epoch: int, weights: dict[str, torch.Tensor]) -> None:
        """Keeps the trained weights of an epoch; `save` with that epoch as the best makes them count."""
        self._replace(self._best_path(epoch), lambda path: save_file(weights, path))

    def load_best(self, epoch: int) -> dict[str, torch.Tensor]:
        """Trained weights of the best epoch."""
        return load_file(self._best_path(epoch))

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _best_path(self, epoch: int) -> Path:
        return self._folder / f"best-{epoch:04d}.safetensors"

    def _replace(self, path: Path, write: Callable[[Path], None]) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(temporary)
            fsync_path(temporary)
            os.replace(temporary, path)
            fsync_path(self._folder)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise storage_error(error, path) from error
