"""Tiny sources, tokenizers and verifier folders."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from eagle3_pipeline.config import PipelineSpec

SpecMaker = Callable[..., PipelineSpec]


def row(text: str, **more: Any) -> dict[str, Any]:
    """A row that holds one prompt."""
    return {"prompt": text, **more}


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Folder of JSONL and Parquet files."""
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def make_spec(source: Path) -> SpecMaker:
    """A pipeline over `source`; keywords are settings of its dataset section."""

    def make(**dataset: Any) -> PipelineSpec:
        section = {"path": str(source / "*.*"), "samples_per_chunk": 4, **dataset}
        return PipelineSpec.model_validate({"name": "p", "verifier": {"model": "none"}, "dataset": section})

    return make
