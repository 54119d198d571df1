"""Which chunk the host tier gives up first. Out-of-tree policies load as `module:Class`."""

from __future__ import annotations

from importlib import import_module

from kvstrata.errors import ConfigError
from kvstrata.policies.arc import Arc
from kvstrata.policies.base import Policy
from kvstrata.policies.lru import Lru
from kvstrata.policies.s3fifo import S3Fifo

__all__ = ["BUILT_IN", "Arc", "Lru", "Policy", "S3Fifo", "open_policy"]

BUILT_IN: dict[str, type[Policy]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}


def open_policy(name: str, capacity: int) -> Policy:
    """A built-in policy by name or an own one by `module:Class`. Raises `ConfigError`."""
    found = BUILT_IN.get(name)
    if found is None:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as e:
            raise ConfigError(
                f"host.policy {name!r} is neither one of {sorted(BUILT_IN)} nor module:Class: {e}"
            ) from e
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise ConfigError(f"host.policy {name!r} is not a kvstrata.policies.Policy")
    return found(capacity)
