"""Sections and their keys: semantic, execution and locator keys told apart.

A *semantic* key decides what an artifact contains and is part of its fingerprint. An *execution* key decides only
how the work is done or when it is refused (batch sizes, memory, workers, thresholds): it is recorded, and changing it
makes nothing stale. A *locator* says where an input lies; what is found there enters fingerprints by its content.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

EXECUTION: dict[str, Any] = {"kind": "execution"}
LOCATOR: dict[str, Any] = {"kind": "locator"}


def execution(default: Any, description: str, **constraints: Any) -> Any:
    """A field that never enters a fingerprint."""
    return Field(default, description=description, json_schema_extra=EXECUTION, **constraints)


def semantic(default: Any, description: str, **constraints: Any) -> Any:
    """A field that is part of the fingerprint of the stages that read its section."""
    return Field(default, description=description, **constraints)


def locator(default: Any, description: str, **constraints: Any) -> Any:
    """A field that says where an input lies."""
    return Field(default, description=description, json_schema_extra=LOCATOR, **constraints)


class Section(BaseModel):
    """A part of a pipeline file. Unknown keys are errors."""

    # NaN and infinity have no canonical JSON.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """The section's semantic keys, ready for a fingerprint."""
        fields = type(self).model_fields
        return {k: v for k, v in self.model_dump(mode="json").items() if not fields[k].json_schema_extra}
