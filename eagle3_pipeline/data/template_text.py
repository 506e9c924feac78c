"""What a chat template's text tells: the variables that it reads, whether it asks for the date. Needs no tokenizer."""

import datetime
import functools
import json
from pathlib import Path
from typing import Any

from eagle3_pipeline.errors import ConfigError, with_causes

CLOCK = "strftime_now"
# What every template is given, by the pipeline or by Transformers.
GIVEN = frozenset({"messages", "add_generation_prompt", "raise_exception", CLOCK})
_SPECIAL_SUFFIX = ("_token", "_tokens")
_GLOBALS = frozenset({"range", "dict", "lipsum", "cycler", "joiner", "namespace", "true", "false", "none"})
_PROBES: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "a"},),
    ({"role": "system", "content": "s"}, {"role": "user", "content": "a"}),
    ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}),
)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag by which Transformers marks answers; for what is asked here it is its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise ConfigError(message)

    def spell(value: Any, *_: Any, **__: Any) -> str:
        return json.dumps(value, default=repr)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = spell
    found.globals["raise_exception"] = refuse
    return found


@functools.lru_cache(maxsize=16)
def read_variables(text: str) -> frozenset[str]:
    """Variables that a template reads and does not set itself.

    Raises:
        ConfigError: it is no Jinja template, or comes out differently each time.
    """
    from jinja2 import TemplateSyntaxError, meta, nodes

    try:
        tree = _environment().parse(text)
    except (TemplateSyntaxError, RecursionError) as error:
        raise ConfigError(f"the chat template cannot be parsed: {with_causes(error)}") from error
    found = meta.find_undeclared_variables(tree)
    by_chance = ["random" for one in tree.find_all(nodes.Filter) if one.name == "random"]
    by_chance += ["lipsum" for one in tree.find_all(nodes.Call) if getattr(one.node, "name", "") == "lipsum"]
    if by_chance:
        raise ConfigError(
            f"the chat template uses {by_chance[0]}: the same conversation would be another prompt each time; give one "
            "without it as verifier.chat_template"
        )
    return frozenset(found) - _GLOBALS


def settable_variables(text: str) -> list[str]:
    """Variables that `generation.chat_template_kwargs` may set with an effect."""
    return sorted(name for name in read_variables(text) - GIVEN if not name.endswith(_SPECIAL_SUFFIX))


def clock_of(date: datetime.date) -> Any:
    """What `strftime_now` is to a frozen template: midnight of one date."""
    return datetime.datetime.combine(date, datetime.time()).strftime


def asks_for_clock(text: str, kwargs: dict[str, Any]) -> bool:
    """Whether a conversation may come out differently tomorrow.

    A template that names the clock may still not ask for it, e.g. where `kwargs` give the date.
    """
    if CLOCK not in text or CLOCK not in read_variables(text):
        return False
    asked: list[str] = []

    def clock(form: str) -> str:
        asked.append(form)
        return form

    for messages in _PROBES:
        for opening in (True, False):
            given = {"messages": list(messages), "add_generation_prompt": opening, CLOCK: clock}
            try:
                _environment().from_string(text).render(**given | kwargs)
            except Exception as error:  # a template raises what it likes; only one that refuses on purpose is known
                if not isinstance(error, ConfigError):
                    return True
    return bool(asked)


def stored_template(folder: str) -> str:
    """The default chat template of a model folder, as Transformers finds it; empty: there is none."""
    path = Path(folder)
    try:
        if (path / "chat_template.jinja").exists():
            return (path / "chat_template.jinja").read_text(encoding="utf-8")
        if (path / "chat_template.json").exists():
            found = json.loads((path / "chat_template.json").read_bytes()).get("chat_template")
        elif (path / "tokenizer_config.json").exists():
            found = json.loads((path / "tokenizer_config.json").read_bytes()).get("chat_template")
        else:
            return ""
    except (OSError, ValueError, AttributeError):
        return ""
    if isinstance(found, list):
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    return found if isinstance(found, str) else ""


@functools.lru_cache(maxsize=16)
def reads_clock(folder: str, _content_id: str, override: str | None, kwargs: str) -> bool:
    """Whether the prompts of a verifier depend on the date.

    Args:
        folder: the verifier's.
        override: `verifier.chat_template`.
        kwargs: `generation.chat_template_kwargs` as JSON.
    """
    text = override if override is not None else stored_template(folder)
    try:
        return asks_for_clock(text, json.loads(kwargs))
    except ConfigError:
        return CLOCK in text
