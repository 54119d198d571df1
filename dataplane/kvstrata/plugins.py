"""Parts that a setting names: built in, or anyone's own as `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TypeVar

from kvstrata.errors import ConfigError

__all__ = ["load_class"]

T = TypeVar("T")


def load_class(setting: str, name: str, kind: type[T], built_in: Mapping[str, str]) -> type[T]:
    """The class that `name` stands for: `built_in[name]`, or itself, read as `module:Class`.

    Imported only now. `setting` is what the message of a `ConfigError` calls it.
    """
    module, _, attribute = built_in.get(name, name).partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            f"{setting} {name!r} is neither one of {sorted(built_in)} nor module:Class: {e}"
        ) from e
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise ConfigError(f"{setting} {name!r} is not a {kind.__module__}.{kind.__qualname__}")
    return found
