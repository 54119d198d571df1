"""Writes docs/settings.md from the settings schema: `make docs`. A test keeps the two equal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic_core import PydanticUndefined

from kvstrata.config import (
    EventSettings,
    NodeSettings,
    ServerSettings,
    TierSettings,
    WrapSettings,
    parse_seconds,
)
from kvstrata.tiers.fs_options import FsOptions
from kvstrata.tiers.obj_options import ObjOptions

HEAD = """\
# Settings

Made from the schema in `dataplane/kvstrata/config.py` by `make docs`; change it there.

A setting is looked for in the flags of the command, then in the environment, then in the file
named by `--config` or `KVSTRATA_CONFIG` (TOML, one table per program), then the default holds.
Names are the same everywhere: `host.lease_ttl` of a node is the flag `--host.lease-ttl`, the
variable `KVSTRATA_NODE_HOST__LEASE_TTL` and, in the file, `lease_ttl` in `[node.host]`.

Sizes are human (`64GiB`, `500MB`) and so are times (`200ms`, `30s`, `5m`); plain numbers are bytes
and seconds. Lists on the command line and in the environment are JSON. A name that doesn't exist
is an error.

```toml
[node]
id = "host-1"

[node.host]
capacity = "64GiB"

[[node.tiers]]
type = "fs"
root = "/var/lib/kvstrata"
capacity = "500GiB"

[node.control]
url = "http://10.0.0.1:7800"
```
"""


def document() -> str:
    parts = [HEAD]
    for command, schema in (("node", NodeSettings), ("server", ServerSettings)):
        prefix = schema.model_config["env_prefix"]
        parts.append(f"## `kvstrata {command}`\n\n{_text(schema)}\n")
        parts.append(f"File table `[{command}]`, environment `{prefix}...`.\n")
        parts += [*_table(schema), ""]
    parts.append(f"## KV events: `[[node.events]]`\n\n{_text(EventSettings)}\n")
    parts += [*_table(EventSettings), ""]
    parts.append(f"## Tiers\n\n{_text(TierSettings)}\n")
    parts += [*_table(TierSettings), "", f"In `wrap`: {_text(WrapSettings)}", ""]
    parts.append("### `fs`\n\nA file system, local or shared by several nodes.\n")
    parts += [*_table(FsOptions), ""]
    parts.append(f"### `obj`\n\n{_text(ObjOptions)} How it behaves: [obj.md](obj.md).\n")
    parts += _table(ObjOptions)
    return "\n".join(parts).rstrip() + "\n"


def _table(schema: type[BaseModel]) -> list[str]:
    head = "| setting | default | what |\n| --- | --- | --- |"
    return [head, *(f"| `{name}` | {default} | {what} |" for name, default, what in _rows(schema))]


def _rows(schema: type[BaseModel], path: str = "") -> Iterator[tuple[str, str, str]]:
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"{path}{name}.*", "", f"**{_text(kind)}**"
            yield from _rows(kind, f"{path}{name}.")
            continue
        what = " ".join((field.description or "").split()).replace("|", "\\|")
        seconds = any(getattr(m, "func", None) is parse_seconds for m in field.metadata)
        default = "required" if field.is_required() else _default(field.default, kind, seconds)
        yield f"{path}{name}", default, what


def _default(value: Any, kind: Any, seconds: bool) -> str:
    if value is PydanticUndefined or value is None:
        return ""
    if kind is ByteSize:
        return f"`{ByteSize(value).human_readable()}`"
    if isinstance(value, PurePath):
        return f"`{value}`"
    if value == "":
        return "empty"
    if seconds:
        return f"`{value:g}s`" if value >= 1 else f"`{1000 * value:g}ms`"
    return f"`{json.dumps(value)}`"


def _text(schema: type[BaseModel]) -> str:
    return " ".join((schema.__doc__ or "").split())


if __name__ == "__main__":
    Path(__file__).with_name("settings.md").write_text(document(), encoding="utf-8")
