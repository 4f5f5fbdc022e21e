"""Settings: TOML text and dotted overrides in, a checked frozen model with the origin of every value out.

A settings class derives from `Settings`; the docstring under a field is its help text, in the code and in
`docs/configuration.md`. Unknown keys, wrong types and values out of range raise `ConfigError` that names the
key and where it was set.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from diloco.errors import ConfigError

Table = dict[str, Any]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Base of every settings class: frozen, strict, and closed to unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _tuple(cls, value: Any) -> Any:
        """A TOML array arrives as a list; frozen settings hold tuples."""
        return tuple(value) if isinstance(value, list) else value


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, kw_only=True)
class Resolved(Generic[S]):
    """Checked settings and, per dotted key, where the value came from."""

    value: S
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, object, str]]:
        """Yields (dotted key, value, origin) for every leaf, in the order of the classes."""
        for key, value in leaves(self.value.model_dump(mode="json")):
            yield key, value, self.origins.get(key, "default")


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) for every value of a nested table that is not itself a table."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def parse(text: str, source: str) -> Table:
    """TOML text to a nested table. Raises `ConfigError` with line and column where it is not TOML."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error


def parse_override(override: str) -> tuple[str, Any]:
    """`a.b=VALUE` to (dotted key, value); VALUE is TOML, and a bare word is a string."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override '{override}' is not KEY=VALUE, for example sync.every_steps=100")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text.strip()


def merge(layers: Sequence[tuple[str, Table]]) -> tuple[Table, dict[str, str]]:
    """Lays tables over each other, the last one on top; returns the table and the origin of every leaf.

    An empty table sets nothing: `[sync]` without keys keeps what the layers below say.
    """
    merged: Table = {}
    origins: dict[str, str] = {}
    for source, table in layers:
        for key, value in leaves(table):
            node = merged
            *parents, last = key.split(".")
            for parent in parents:
                child = node.setdefault(parent, {})
                if not isinstance(child, dict):
                    raise ConfigError(f"{source}: '{key}' is set, but '{parent}' is already a plain value")
                node = child
            if value == {}:
                node.setdefault(last, {})
                origins.setdefault(key, source)
            else:
                node[last] = value
                origins[key] = source
    return merged, origins


def resolve(cls: type[S], layers: Sequence[tuple[str, Table]], overrides: Sequence[str] = ()) -> Resolved[S]:
    """Lays `layers` and then dotted `overrides` over the defaults of `cls` and checks the result.

    Args:
        cls: the settings class.
        layers: (name of the source, table), the strongest last.
        overrides: `a.b=VALUE` from a command line.

    Raises:
        ConfigError: one line per fault, each with its key and its source.
    """
    top: list[tuple[str, Table]] = []
    for override in overrides:
        key, value = parse_override(override)
        for part in reversed(key.split(".")):
            value = {part: value}
        top.append(("--set", value))
    merged, origins = merge([*layers, *top])
    try:
        return Resolved(value=cls.model_validate(merged), origins=origins)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(cls, fault, origins) for fault in error.errors())) from error


def _explain(cls: type[Settings], fault: Any, origins: Mapping[str, str]) -> str:
    """One pydantic fault as a line: source, key, what is wrong, what would be right."""
    key = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":  # a rule between settings: its message names them
        sources = dict.fromkeys(source for k, source in origins.items() if k in message)
        return f"{', '.join(sources)}: {message}" if sources else message
    if fault["type"] == "missing":
        section = _section(cls, fault["loc"])
        if section:
            key += "." + next(name for name, field in section.model_fields.items() if field.is_required())
        return f"'{key}' is required: set it in the file or with --set {key}=VALUE"
    related = (s for k, s in origins.items() if f"{k}.".startswith(f"{key}.") or key.startswith(f"{k}."))
    source = next(related, None)
    where = f"{source}: " if source else ""
    if fault["type"] == "extra_forbidden":
        *parents, name = fault["loc"]
        return f"{where}unknown key '{key}'{_suggest(_section(cls, parents), str(name))}"
    return f"{where}'{key}': {message[0].lower()}{message[1:]}, not {fault['input']!r}"


def _section(cls: type[Settings], loc: Sequence[Any]) -> type[Settings] | None:
    """The settings class that `loc` names, or None where it names a plain value."""
    node: Any = cls
    for part in loc:
        field = node.model_fields.get(str(part))
        node = field.annotation if field else None
        if not (isinstance(node, type) and issubclass(node, Settings)):
            return None
    return node  # type: ignore[no-any-return]


def _suggest(section: type[Settings] | None, name: str) -> str:
    import difflib

    known = list(section.model_fields) if section else []
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else f"; known keys: {', '.join(known)}"


def to_toml(settings: Settings) -> str:
    """Settings as canonical TOML: the same text for equal settings, readable by `parse`."""
    return _dump(settings.model_dump(mode="json"), "")


def _dump(table: Mapping[str, Any], prefix: str) -> str:
    import json

    def literal(value: object) -> str:  # JSON's, but for DEL, which TOML wants escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

    plain = [f"{k} = {literal(v)}\n" for k, v in table.items() if not isinstance(v, Mapping) and v is not None]
    text = (f"[{prefix}]\n" if prefix and plain else "") + "".join(plain) + ("\n" if plain else "")
    for key, value in table.items():
        if isinstance(value, Mapping):
            text += _dump(value, f"{prefix}.{key}" if prefix else key)
    return text
