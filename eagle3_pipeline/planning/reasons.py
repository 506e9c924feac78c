"""Why an artifact is not fresh: what it is compared with, and which keys and inputs differ."""

import os
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from eagle3_pipeline.stages.context import Identity, StageContext
from eagle3_pipeline.store.fingerprint import digest
from eagle3_pipeline.store.manifest import Manifest, read_manifest
from eagle3_pipeline.store.objects import Artifact
from eagle3_pipeline.store.references import Reference


class History:
    """Finds what to compare with: what the pipeline used last, else what another one made of the same inputs."""

    def __init__(self, context: StageContext) -> None:
        self._store = context.store
        self._by_inputs: dict[str, dict[str, Manifest]] = {}

    def lost(self, identity: Identity, reference: Reference | None) -> str:
        """What became of this very artifact if it was made; empty: it was not."""
        if why := self._quarantine.get((identity.stage, identity.fingerprint)):
            return f"was found damaged and is in quarantine: {why}"
        gone = reference is not None and reference.fingerprint == identity.fingerprint
        return "is gone from the store" if gone else ""

    @cached_property
    def _quarantine(self) -> dict[tuple[str, str], str]:
        return self._store.quarantined()

    def previous(self, identity: Identity, reference: Reference | None) -> Manifest | None:
        """What an artifact that is not there is compared with."""
        manifest = None
        if reference:
            manifest = read_manifest(self._store.object_folder(identity.stage, reference.fingerprint))
        return manifest or self._siblings(identity.stage).get(digest(identity.inputs))

    def _siblings(self, stage: str) -> dict[str, Manifest]:
        """The store's manifests of a stage by their inputs; read once."""
        if stage not in self._by_inputs:
            self._by_inputs[stage] = {}
            for path in sorted((self._store.root / "objects" / stage).glob("*/manifest.json")):
                manifest = read_manifest(path.parent)
                if manifest and path.parent.suffix != ".partial":
                    self._by_inputs[stage][digest(manifest.inputs)] = manifest
        return self._by_inputs[stage]


def changes(previous: Manifest, identity: Identity) -> str:
    """Keys and inputs that changed, each with old and new value."""
    found = [*_changes(previous.spec, identity.spec), *_changes(previous.inputs, identity.inputs, "input ")]
    return "; ".join(found) or f"format version {identity.format_version} of the stage is new"


def damage(artifact: Artifact) -> str:
    """What the sizes of an artifact's files say is wrong; empty: nothing."""
    for name, entry in artifact.manifest.files.items():
        try:
            size = os.stat(f"{artifact.folder}/{name}").st_size
        except OSError:
            return f"{name} is missing"
        if size != entry.size_bytes:
            return f"{name} has {size:,} bytes, expected {entry.size_bytes:,}"
    return ""


def _changes(old: Any, new: Any, prefix: str = "") -> Iterator[str]:
    """`key old -> new` for every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            if old.get(key) != new.get(key):
                name = f"{prefix}{key}" if not prefix or prefix.endswith(" ") else f"{prefix}.{key}"
                yield from _changes(old.get(key), new.get(key), name)
    else:
        yield f"{prefix} {_short(old)} -> {_short(new)}"


def _short(value: Any) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:12]}..."
