"""Where settings come from: flags, then the environment (`KVSTRATA_NODE_HOST__CAPACITY` for
`host.capacity` of a node), then the file (TOML, one table a program), then the default.

An unknown name is an error: a `ConfigError` where pydantic would not see it, as a file that is
absent, a table or a variable that belongs to nothing.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    TomlConfigSettingsSource,
)

from kvstrata.errors import ConfigError

__all__ = ["sources_of"]

_TABLES = frozenset({"node", "server"})
# What Kubernetes puts into the environment for a Service that is called like our prefix.
_SERVICE_LINK = re.compile(r"SERVICE_(HOST|PORT.*)|PORT(_[0-9]+_.*)?")


def sources_of(
    schema: type[BaseSettings],
    given: PydanticBaseSettingsSource,
    environment: PydanticBaseSettingsSource,
) -> tuple[PydanticBaseSettingsSource, ...]:
    """Of a program's settings, in the order they are asked; `given` are the flags. Its `env_prefix`
    begins its variables, and its `title` is its table. Raises `ConfigError`."""
    _check_environment(str(schema.model_config.get("env_prefix", "")), schema)
    path = os.environ.get("KVSTRATA_CONFIG", "")
    if not path:
        return given, environment
    if not Path(path).is_file():
        raise ConfigError(f"KVSTRATA_CONFIG names {path}, which is not a file")
    table = str(schema.model_config.get("title", ""))
    return given, environment, _TomlTable(schema, Path(path), table)


class _TomlTable(TomlConfigSettingsSource):
    """One table (`[node]`, `[server]`) of the settings file."""

    def __init__(self, settings_cls: type[BaseSettings], path: Path, table: str) -> None:
        self._table = table
        super().__init__(settings_cls, path)

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        tables = super()._read_file(file_path)
        unknown = sorted(tables.keys() - _TABLES)
        if unknown:
            raise ConfigError(f"{file_path} has {unknown}: its tables are {sorted(_TABLES)}")
        return dict(tables.get(self._table, {}))


def _check_environment(prefix: str, schema: type[BaseSettings]) -> None:
    """Raises `ConfigError` on a variable that would be silently ignored."""
    for name in os.environ:
        rest = name.upper().removeprefix(prefix)
        if rest == name.upper() or _SERVICE_LINK.fullmatch(rest):
            continue
        if rest.split("__")[0].lower() not in schema.model_fields:
            known = ", ".join(sorted(schema.model_fields))
            raise ConfigError(f"{name} sets nothing: after {prefix} comes one of {known}")
