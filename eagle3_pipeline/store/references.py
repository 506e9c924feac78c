"""`pipelines/<P>/<stage>/<chunk>.json`: which artifact a pipeline uses where."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from eagle3_pipeline.store import atomic
from eagle3_pipeline.store.manifest import Manifest, utc_now

UNPARTITIONED = "all"


@dataclass(frozen=True)
class Reference:
    """A pipeline's pointer to an artifact."""

    stage: str
    fingerprint: str
    content_id: str
    updated_at: str


class References:
    """The references of one pipeline."""

    def __init__(self, root: Path, pipeline: str) -> None:
        self.folder = root / "pipelines" / pipeline

    def _path(self, stage: str, chunk: str | None) -> Path:
        return self.folder / stage / f"{chunk or UNPARTITIONED}.json"

    def set(self, stage: str, chunk: str | None, manifest: Manifest) -> None:
        """Points (stage, chunk) at the manifest's artifact; writes only what changes."""
        current = self.get(stage, chunk)
        if current and (current.fingerprint, current.content_id) == (manifest.fingerprint, manifest.content_id):
            return
        reference = Reference(stage, manifest.fingerprint, manifest.content_id, utc_now())
        atomic.write_json(self._path(stage, chunk), asdict(reference))

    def get(self, stage: str, chunk: str | None) -> Reference | None:
        """The current pointer; `None` if there is none or it cannot be read."""
        try:
            return Reference(**json.loads(self._path(stage, chunk).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def places(self) -> Iterator[tuple[str, str | None]]:
        """(stage, chunk) of every reference file, readable or not."""
        for path in sorted(self.folder.glob("*/*.json")):
            # `published_draft` is a link to an artifact.
            if path.parent.is_symlink():
                continue
            yield path.parent.name, None if path.stem == UNPARTITIONED else path.stem
