"""Which chunk the host tier gives up first. Out-of-tree policies load as `module:Class`."""

from __future__ import annotations

from kvstrata.plugins import load_class
from kvstrata.policies.arc import Arc
from kvstrata.policies.base import Policy
from kvstrata.policies.lru import Lru
from kvstrata.policies.s3fifo import S3Fifo

__all__ = ["BUILT_IN", "Arc", "Lru", "Policy", "S3Fifo", "open_policy"]

BUILT_IN: dict[str, type[Policy]] = {"lru": Lru, "arc": Arc, "s3fifo": S3Fifo}
_PLACES = {name: f"{cls.__module__}:{cls.__qualname__}" for name, cls in BUILT_IN.items()}


def open_policy(name: str, capacity: int) -> Policy:
    """A built-in policy by name or an own one by `module:Class`. Raises `ConfigError`."""
    return load_class("host.policy", name, Policy, _PLACES)(capacity)
