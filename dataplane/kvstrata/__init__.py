"""kvstrata: a tiered KV-cache store for LLM inference, for any engine and any accelerator.

The public names are here; each is imported from its module when it is first used, so that
`import kvstrata` costs nothing an engine would notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata.client import Client
    from kvstrata.config import NodeSettings, ServerSettings
    from kvstrata.control import ControlPlane, SyncControlPlane
    from kvstrata.errors import (
        Busy,
        ConfigError,
        Corrupt,
        Expired,
        KVStrataError,
        LinkBroken,
        Malformed,
        Missing,
        NamespaceMismatch,
        NoSpace,
        PeerRefused,
    )
    from kvstrata.keys import Field, Group, Key, Namespace, make_key, split_key
    from kvstrata.node.process import Node
    from kvstrata.policies import Policy
    from kvstrata.region import Region
    from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage
    from kvstrata.transports.base import Transport

__all__ = [
    "Busy",
    "Client",
    "ConfigError",
    "ControlPlane",
    "Corrupt",
    "Expired",
    "Field",
    "Group",
    "Item",
    "KVStrataError",
    "Key",
    "LinkBroken",
    "Malformed",
    "Missing",
    "Namespace",
    "NamespaceMismatch",
    "NoSpace",
    "Node",
    "NodeSettings",
    "Outcome",
    "PeerRefused",
    "Policy",
    "Region",
    "ServerSettings",
    "SyncControlPlane",
    "Tier",
    "TierContext",
    "Transport",
    "Usage",
    "__version__",
    "make_key",
    "split_key",
]

_NAMES = {
    "kvstrata.client": ("Client",),
    "kvstrata.config": ("NodeSettings", "ServerSettings"),
    "kvstrata.control": ("ControlPlane", "SyncControlPlane"),
    "kvstrata.errors": (
        "Busy",
        "ConfigError",
        "Corrupt",
        "Expired",
        "KVStrataError",
        "LinkBroken",
        "Malformed",
        "Missing",
        "NamespaceMismatch",
        "NoSpace",
        "PeerRefused",
    ),
    "kvstrata.keys": ("Field", "Group", "Key", "Namespace", "make_key", "split_key"),
    "kvstrata.node.process": ("Node",),
    "kvstrata.policies": ("Policy",),
    "kvstrata.region": ("Region",),
    "kvstrata.tiers.base": ("Item", "Outcome", "Tier", "TierContext", "Usage"),
    "kvstrata.transports.base": ("Transport",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = import_module("importlib.metadata").version("kvstrata")
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
