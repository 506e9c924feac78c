"""Which texts are cron expressions that Dagster schedules by."""

import re

# minute, hour, day of the month, month, day of the week: lowest and highest value, and names of values.
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_FIELDS: tuple[tuple[str, int, int, dict[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of the month", 1, 31, {"l": 31}),
    ("month", 1, 12, {name: number for number, name in enumerate(_MONTHS, 1)}),
    ("day of the week", 0, 7, {name: number for number, name in enumerate(_DAYS)}),
)
_ALIASES = ("@hourly", "@daily", "@midnight", "@weekly", "@monthly", "@yearly", "@annually")
# Dagster's takes ? for any day, the n-th and the last weekday of a month, and a random value, too.
_ANY = ("*", "?", "r")
_WEEKDAY_OF_MONTH = re.compile(r"l[0-7]|\w+#([1-5]|l)")
_PART = re.compile(r"(?P<first>[*?]|\w+)(-(?P<last>\w+))?(/(?P<step>[0-9]+))?")


def cron_problem(text: str) -> str | None:
    """What is wrong with a cron expression; `None`: nothing."""
    if text.lower() in _ALIASES:
        return None
    parts = text.split()
    if len(parts) != len(_FIELDS):
        return f"it has {len(parts)} fields, expected 5 ({', '.join(name for name, *_ in _FIELDS)})"
    values: list[set[int]] = []
    for field, (name, low, high, names) in zip(parts, _FIELDS, strict=True):
        found: set[int] = set()
        for part in field.split(","):
            several = _values(part, low, high, names)
            if not several or ("?" in part and not name.startswith("day")):
                return f"{name} is {field!r}, expected values from {low} to {high}: *, 5, 1-5, */15 or 1,15"
            found |= several
        values.append(found)
    if values[3] == {2} and min(values[2]) > 29:
        return f"February has no day {parts[2]}"
    return None


def _values(part: str, low: int, high: int, names: dict[str, int]) -> set[int] | None:
    """Values that a part of a field stands for; `None` if it is none."""
    if names.get("sun") == 0 and _WEEKDAY_OF_MONTH.fullmatch(part.lower()):
        return set(range(low, high + 1))
    match = _PART.fullmatch(part.lower())
    if match is None or (match["first"] in _ANY and match["last"]):
        return None
    step = int(match["step"] or 1)
    if match["first"] in _ANY:
        first, last = low, high
    else:
        found = [_number(text, names) for text in (match["first"], match["last"]) if text is not None]
        if any(value is None or not low <= value <= high for value in found):
            return None
        first = found[0] or 0
        # As cron: from here on, in steps.
        last = (found[-1] or 0) if match["last"] or not match["step"] else high
    if step < 1:
        return None
    # 22-2: over midnight.
    span = range(first, last + 1) if first <= last else [*range(first, high + 1), *range(low, last + 1)]
    return set(span[::step])


def _number(text: str, names: dict[str, int]) -> int | None:
    return names[text] if text in names else int(text) if text.isascii() and text.isdigit() else None
