"""Writes `docs/configuration.md` from the settings classes and the docstrings under their fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from diloco.config import PRESETS, RunConfig
from diloco.settings import Settings
from island.config import IslandConfig

PAGE = Path(__file__).with_name("configuration.md")

HEAD = """\
<!-- Written by docs/generate.py from the settings classes; edit those. -->

# Configuration

A run has one `run.toml`, which the coordinator owns and serves to every island that joins: islands cannot
disagree about what is in it. Each island has an `island.toml` with what is local to its site. Only the names
are required:

```toml
# run.toml
preset = "streaming"

[run]
id = "first"
steps = 2000

[sync]
every_steps = 50
```

```toml
# island.toml
[island]
id = "alpha"
coordinator = "coordinator.example:7070"
```

## How a setting resolves

The later one wins:

1. the default of the setting, in the tables below;
2. the preset that `preset = "NAME"` at the top of a `run.toml` names;
3. the file;
4. `--set KEY=VALUE` on the command line, the last one of several.

`VALUE` is TOML (`3`, `0.5`, `true`, `[1, 26]`), and a bare word is a string: `--set sync.strategy=strided`.
A table without keys sets nothing.

Every fault is an error: an unknown key, a value of another type (nothing is converted, but an integer is
accepted as a number), a number out of range or not finite, and, once each value is right by itself, settings
that do not fit together. The message lists all of them, with the keys, where they were set, and what to set
instead.

```sh
diloco config check run.toml
diloco config show run.toml --set outer.lr=0.5
diloco config show island.toml --json
```

`config check` says what is wrong with a file; `config show` prints every setting with its value and where
that comes from: `default`, `preset NAME`, the file, or `--set`.
"""


def page() -> str:
    """The whole page."""
    run, island = _reference("run.toml", RunConfig), _reference("island.toml", IslandConfig)
    return "\n".join([HEAD, *_presets(), *run, *island])


def _presets() -> Iterator[str]:
    yield "## Presets\n"
    for name, table in PRESETS.items():
        values = (f"`{s}.{k} = {json.dumps(v)}`" for s, keys in table.items() for k, v in keys.items())
        yield f"- `{name}`: {', '.join(values)}"
    yield ""


def _reference(file: str, cls: type[Settings]) -> Iterator[str]:
    """One table per section of `cls`, in the order of the classes."""
    yield f"## {file}\n"
    for name, section in cls.model_fields.items():
        assert isinstance(section.annotation, type) and issubclass(section.annotation, Settings)
        yield f"### [{name}]\n"
        yield "| key | default | values | meaning |"
        yield "|---|---|---|---|"
        schema = section.annotation.model_json_schema()
        for key, field in schema["properties"].items():
            default = f"`{json.dumps(field['default'])}`" if "default" in field else "required"
            meaning = " ".join(field["description"].split())
            yield _row(f"`{name}.{key}`", default, _values(field), meaning)
        yield ""


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(schema: Mapping[str, Any]) -> str:
    """What the JSON schema of a field allows, in words."""
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if "prefixItems" in schema:
        return f"{schema['minItems']} × {_values(schema['prefixItems'][0])}"
    if "additionalProperties" in schema:
        return "a table"
    if "items" in schema:
        return f"any number of {_values(schema['items'])}s"
    if schema["type"] == "object":
        return "table"
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = (f"{sign} {schema[word]}" for word, sign in signs.items() if word in schema)
    return " ".join([schema["type"], ", ".join(bounds)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
