"""Filters of the data set: source, length, language."""

import functools
from typing import Any

from eagle3_pipeline.config import DatasetSpec, FiltersSpec
from eagle3_pipeline.data.rejection import Rejection
from eagle3_pipeline.data.row_formats import column
from eagle3_pipeline.errors import ConfigError

# Among few candidates, formulas and code are less often taken for a rare language.
_CANDIDATES = (
    "ar bg bn ca cs da de el en es et fa fi fr he hi hr hu id it ja ko lt lv ms nl no pl pt ro ru sk sl sr sv sw ta te "
    "th tr uk ur vi zh"
)
# A guess below this is none: the row stays.
_SURE = 0.4
_DETECTED_CHARS = 4000


def check_row(row: dict[str, Any], spec: DatasetSpec) -> Rejection | None:
    """Filters on the row's own columns."""
    filters, columns = spec.filters, spec.columns
    source = column(row, columns.source)
    if filters.sources is not None and source not in filters.sources:
        return Rejection("filtered_source", f"{columns.source} is {ascii(source)[:80]}, not in dataset.filters.sources")
    if source in filters.exclude_sources:
        return Rejection("filtered_source", f"{columns.source} is {ascii(source)[:80]}")
    language = column(row, columns.language)
    if filters.languages is not None and language is not None and language not in filters.languages:
        return Rejection("filtered_language", f"{columns.language} is {ascii(language)[:80]}")
    return None


def check_length(messages: list[dict[str, str]], filters: FiltersSpec) -> Rejection | None:
    """Filters on the conversation's length."""
    num_chars = sum(len(message["content"]) for message in messages)
    if num_chars < filters.min_chars:
        return Rejection("too_short", f"{num_chars} characters, dataset.filters.min_chars is {filters.min_chars}")
    if filters.max_chars is not None and num_chars > filters.max_chars:
        return Rejection("too_long", f"{num_chars} characters, dataset.filters.max_chars is {filters.max_chars}")
    if filters.max_turns is not None and len(messages) > filters.max_turns:
        return Rejection("too_long", f"{len(messages)} turns, dataset.filters.max_turns is {filters.max_turns}")
    return None


def check_language(row: dict[str, Any], messages: list[dict[str, str]], spec: DatasetSpec) -> Rejection | None:
    """Filter on the detected language, for rows that do not name theirs.

    Raises:
        ConfigError: a language that cannot be detected is asked for.
    """
    wanted = spec.filters.languages
    if wanted is None or column(row, spec.columns.language) is not None:
        return None
    text = "\n".join(message["content"] for message in messages)[:_DETECTED_CHARS]
    language, probability = _identifier(tuple(wanted)).classify(text)
    if language in wanted or probability < _SURE:
        return None
    return Rejection("filtered_language", f"looks like {language} ({probability:.0%})")


@functools.lru_cache(maxsize=4)
def _identifier(wanted: tuple[str, ...]) -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    unknown = sorted(set(wanted) - set(identifier.labels))
    if unknown:
        raise ConfigError(
            f"dataset.filters.languages: {', '.join(unknown)} cannot be detected; for rows without a language column "
            "give ISO 639 codes such as en, de, zh"
        )
    identifier.set_languages({*_CANDIDATES.split(), *wanted})
    return identifier
