"""Sections and their keys: semantic, execution and locator keys told apart.

A *semantic* key decides what an artifact contains and is part of its fingerprint. An *execution* key decides only
how the work is done or when it is refused (batch sizes, memory, workers, thresholds): it is recorded, and changing it
makes nothing stale. A *locator* says where an input lies; what is found there enters fingerprints by its content.
"""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

EXECUTION: dict[str, Any] = {"kind": "execution"}
LOCATOR: dict[str, Any] = {"kind": "locator"}
LATER: dict[str, Any] = {"kind": "later"}


def execution(default: Any, description: str, **constraints: Any) -> Any:
    """A field that never enters a fingerprint."""
    return Field(default, description=description, json_schema_extra=EXECUTION, **constraints)


def semantic(default: Any, description: str, **constraints: Any) -> Any:
    """A field that is part of the fingerprint of the stages that read its section."""
    return Field(default, description=description, **constraints)


def later(default: Any, description: str, **constraints: Any) -> Any:
    """A semantic key that an earlier release did not have: at its default it does not enter fingerprints.

    What that release stored stays fresh.
    """
    return Field(default, description=description, json_schema_extra=LATER, **constraints)


def locator(default: Any, description: str, **constraints: Any) -> Any:
    """A field that says where an input lies."""
    return Field(default, description=description, json_schema_extra=LOCATOR, **constraints)


class Section(BaseModel):
    """A part of a pipeline file. Unknown keys are errors."""

    # NaN and infinity have no canonical JSON.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def semantic(self) -> dict[str, Any]:
        """The section's semantic keys, ready for a fingerprint."""
        return self._select(None, LATER)

    def described(self, exclude: set[str]) -> dict[str, Any]:
        """All keys but `exclude`, ready for an identity; those of a later release only where they are set."""
        found = self._select(None, EXECUTION, LOCATOR, LATER)
        return {key: value for key, value in found.items() if key not in exclude}

    def _select(self, *kinds: dict[str, Any] | None) -> dict[str, Any]:
        dumped, selected = self.model_dump(mode="json"), {}
        for key, field in type(self).model_fields.items():
            value, extra = getattr(self, key), field.json_schema_extra
            if extra not in kinds or (extra == LATER and value == field.get_default(call_default_factory=True)):
                continue
            selected[key] = value._select(*kinds) if isinstance(value, Section) else dumped[key]
        return selected
