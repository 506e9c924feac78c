"""README stays true: its tree, its commands, its example pipeline, its links."""

import re
from pathlib import Path

import pytest
import yaml

from eagle3_pipeline.cli import main
from eagle3_pipeline.config import PipelineSpec
from eagle3_pipeline.definitions import build_definitions

REPOSITORY = Path(__file__).parents[2]
README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language; fences alternate between opening and closing."""
    parts = re.split(r"^```(.*)\n", README, flags=re.MULTILINE)
    return [parts[i + 1] for i in range(1, len(parts), 4) if parts[i] == language]


def tree() -> str:
    return next(block for block in blocks("") if block.startswith("eagle3_pipeline/\n"))


def test_every_path_of_the_tree_exists() -> None:
    package = REPOSITORY / "eagle3_pipeline"
    missing = []
    folder = package
    for line in tree().splitlines()[1:]:
        indent = len(line) - len(line.lstrip())
        name, _, words = line.strip().partition(" ")
        if indent <= 2:
            folder = (REPOSITORY if indent == 0 else package) / name
            missing += [] if folder.exists() else [name]
        else:
            words = line
        if folder.is_dir():
            listed = [word for word in words.split() if re.fullmatch(r"\w+\.(py|yaml|jsonl)", word)]
            missing += [word for word in listed if not (folder / word).exists()]
    assert missing == []


def test_every_module_outside_training_and_stages_is_in_the_tree() -> None:
    """Small folders are listed whole; `training/`, `stages/`, `assets/` are described."""
    for folder in ("store", "data", "engine", "evaluation"):
        modules = {path.name for path in (REPOSITORY / "eagle3_pipeline" / folder).glob("*.py")} - {"__init__.py"}
        assert sorted(name for name in modules if name not in tree()) == [], folder


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_commands_exist() -> None:
    for command in set(re.findall(r"^(?:\.venv/bin/)?eagle3 ([a-z-]+)", "\n".join(blocks("sh")), re.MULTILINE)):
        assert command in main.commands, command


@pytest.mark.parametrize("block", blocks("yaml"))
def test_the_example_pipeline_is_valid(block: str) -> None:
    PipelineSpec.model_validate({"name": "my_model", **yaml.safe_load(block)})


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (REPOSITORY / target).exists(), target


def test_sensors_schedules_and_schedule_keys_exist() -> None:
    spec = PipelineSpec.model_validate({"name": "my_model", **yaml.safe_load(blocks("yaml")[0])})
    repository = build_definitions([spec]).get_repository_def()
    names = {one.name for one in repository.sensor_defs} | {one.name for one in repository.schedule_defs}
    named = set(re.findall(r"`(my_model__\w+|report_failures)`", README))
    assert len(named) == 5 and named <= names
    keys = re.findall(r"`((?:schedule|resources|dataset)\.\w+)", README)
    assert len(keys) > 5
    for section, key in (name.split(".") for name in keys):
        assert key in type(getattr(spec, section)).model_fields, f"{section}.{key}"
