"""Pipeline files: a section each for verifier, data, training and so on, validated as a whole."""

import hashlib
import json
import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, model_validator

from eagle3_pipeline.config.fields import Section
from eagle3_pipeline.config.sections import (
    AssumptionsSpec,
    CaptureSpec,
    DatasetSpec,
    DraftSpec,
    EvaluationSpec,
    GenerationSpec,
    PublishSpec,
    ResourcesSpec,
    ScheduleSpec,
    TrainingSpec,
    VerifierSpec,
    VocabSpec,
)
from eagle3_pipeline.errors import ConfigError

_PACKAGE = Path(__file__).parent.parent
PACKAGE_PIPELINES = _PACKAGE / "pipelines"
DEFAULT_ENABLED = "smollm2_demo"


def project_home() -> Path:
    """Folder of everything mutable: `$EAGLE3_HOME`, else `.eagle3` beside the checkout, else `~/.eagle3`."""
    if home := os.environ.get("EAGLE3_HOME"):
        return Path(home).expanduser().absolute()
    checkout = _PACKAGE.parent
    base = checkout if (checkout / "workspace.yaml").exists() else Path.home()
    return (base / ".eagle3").absolute()


class PipelineSpec(Section):
    """One pipeline file. `name` is the file's stem."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$", description="stem of the file")
    verifier: VerifierSpec
    dataset: DatasetSpec
    generation: GenerationSpec = GenerationSpec()
    capture: CaptureSpec = CaptureSpec()
    vocab: VocabSpec = VocabSpec()
    draft: DraftSpec = DraftSpec()
    training: TrainingSpec = TrainingSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    publish: PublishSpec = PublishSpec()
    resources: ResourcesSpec = ResourcesSpec()
    schedule: ScheduleSpec = ScheduleSpec()
    assumptions: AssumptionsSpec = AssumptionsSpec()

    @model_validator(mode="after")
    def _check_combinations(self) -> "PipelineSpec":
        generation, training = self.generation, self.training
        if generation.max_new_tokens >= generation.max_sequence_tokens:
            raise ValueError("generation.max_new_tokens must be below generation.max_sequence_tokens")
        if training.batch_tokens < generation.max_sequence_tokens:
            raise ValueError("training.batch_tokens must be at least generation.max_sequence_tokens")
        if self.capture.aux_layer_ids is not None and len(self.capture.aux_layer_ids) != 3:
            raise ValueError("capture.aux_layer_ids must name three layers (EAGLE-3 concatenates three)")
        return self

    @cached_property
    def semantic_sections(self) -> dict[str, dict[str, Any]]:
        """The semantic keys of every section."""
        return {k: getattr(self, k).semantic() for k in type(self).model_fields if k != "name"}

    def spec_hash(self) -> str:
        """Hash of all semantic keys: the `eagle3/spec_hash` tag of a run."""
        return hashlib.sha256(json.dumps(self.semantic_sections, sort_keys=True).encode()).hexdigest()[:16]


def expand(text: str) -> str:
    """Expands `${VAR}`; `${EAGLE3_HOME}` is always defined.

    Raises:
        ConfigError: a variable is not set.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name == "EAGLE3_HOME":
            return str(project_home())
        if name not in os.environ:
            raise ConfigError(f"{text!r} names the environment variable {name}, which is not set")
        return os.environ[name]

    return re.sub(r"\$\{(\w+)\}", value, text)


def _explain(path: Path, error: ValidationError) -> str:
    lines = [f"{path}: {error.error_count()} problem(s)"]
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"]) or "(file)"
        if item["type"] == "extra_forbidden":
            allowed = _allowed_keys(item["loc"][:-1])
            lines.append(f"  {key}: unknown key; allowed keys: {', '.join(allowed)}")
        else:
            found = "" if item["type"] in ("missing", "value_error") else f"; found {item['input']!r}"
            advice = " (the file's name: rename it)" if key == "name" else ""
            lines.append(f"  {key}: {item['msg']}{found}{advice}")
    return "\n".join(lines)


def _allowed_keys(location: tuple[int | str, ...]) -> list[str]:
    model: Any = PipelineSpec
    for part in location:
        model = model.model_fields[part].annotation
    return [key for key in model.model_fields if key != "name" or model is not PipelineSpec]


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is written twice is an error, not the end of the first one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """A mapping whose keys are all different."""
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1 and key != "<<"})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"written twice: {', '.join(twice)}", node.start_mark)
        return super().construct_mapping(node, deep)


def load_pipeline(path: Path) -> PipelineSpec:
    """Reads and validates one pipeline file.

    Raises:
        ConfigError: names the file, each wrong key and what is allowed there.
    """
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506  # a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    if "name" in data:
        raise ConfigError(f"{path}: name: unknown key; a pipeline is named as its file")
    try:
        return PipelineSpec(name=path.stem, **{str(k): v for k, v in data.items()})
    except ValidationError as error:
        raise ConfigError(_explain(path, error)) from error


def pipeline_files() -> dict[str, Path]:
    """Pipeline files by name: the package's, then each folder of `EAGLE3_PIPELINES` (later ones win)."""
    folders = [PACKAGE_PIPELINES]
    folders += [Path(p).expanduser() for p in os.environ.get("EAGLE3_PIPELINES", "").split(os.pathsep) if p]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"EAGLE3_PIPELINES names {folder}, which is not a folder")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_pipeline(name: str) -> PipelineSpec:
    """Loads the pipeline of this name.

    Raises:
        ConfigError: there is no such pipeline, or its file is wrong.
    """
    files = pipeline_files()
    if name not in files:
        raise ConfigError(f"no pipeline is named {name!r}; there are: {', '.join(sorted(files))}")
    return load_pipeline(files[name])


def enabled_names() -> list[str]:
    """Names in `EAGLE3_ENABLED` (comma-separated; default: the demo)."""
    names = [n.strip() for n in os.environ.get("EAGLE3_ENABLED", DEFAULT_ENABLED).split(",") if n.strip()]
    return list(dict.fromkeys(names))


def load_enabled() -> tuple[list[PipelineSpec], dict[str, str]]:
    """The enabled pipelines that can be loaded, and by name why others cannot: one's file is no fault of another.

    Raises:
        ConfigError: pipelines are enabled, and none can be loaded.
    """
    specs, broken = [], dict[str, str]()
    for name in enabled_names():
        try:
            specs.append(find_pipeline(name))
        except ConfigError as error:
            broken[name] = str(error)
    if broken and not specs:
        raise ConfigError("\n".join(broken.values()))
    return specs, broken


def enabled_pipelines() -> list[PipelineSpec]:
    """The enabled pipelines that can be loaded.

    Raises:
        ConfigError: pipelines are enabled, and none can be loaded.
    """
    return load_enabled()[0]
