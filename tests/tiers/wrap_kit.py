"""Tiers for tests to wrap, and options that work."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvstrata.keys import Key
from kvstrata.testing.chunks import a_namespace
from kvstrata.testing.memory_tier import MemoryTier
from kvstrata.testing.tiers import aligned, payload
from kvstrata.tiers.base import Item, Tier, TierContext
from kvstrata.tiers.wrappers.base import Wrapper
from kvstrata.tiers.wrappers.checked import Checked
from kvstrata.tiers.wrappers.compressed import Compressed
from kvstrata.tiers.wrappers.encrypted import Encrypted
from kvstrata.tiers.wrappers.metered import Metered

WRAPPERS: dict[str, type[Wrapper]] = {
    "metered": Metered,
    "checked": Checked,
    "compressed": Compressed,
    "encrypted": Encrypted,
}
NAMESPACES = {ns.digest: ns for ns in (a_namespace(), a_namespace(tenant="other"))}


def secret(number: int) -> str:
    return base64.b64encode(bytes([number]) * 32).decode()


def key_file(folder: Path, tenants: dict[str, list[str]] | None = None, mode: int = 0o600) -> Path:
    """A file with secrets of two tenants, "" and "other", or of those given."""
    path = folder / "secrets.json"
    content = {"": [secret(1)], "other": [secret(2)]} if tenants is None else tenants
    path.write_text(json.dumps({"tenants": content}))
    path.chmod(mode)
    return path


def options_of(name: str, folder: Path) -> dict[str, Any]:
    return {"keys": str(key_file(folder))} if name == "encrypted" else {}


def wrapped(inner: Tier, names: list[str], folder: Path, context: TierContext) -> Any:
    """Inner with the wrappers named around it, the last the outermost."""
    for name in names:
        inner = WRAPPERS[name].wrap(inner, options_of(name, folder), context)
    return inner


def context_of(clock: Callable[[], float], removed: list[Key] | None = None) -> TierContext:
    return TierContext("node", clock, NAMESPACES.get, ([] if removed is None else removed).extend)


def key(i: int, tenant: str = "") -> Key:
    return a_namespace(tenant=tenant).key(0, i.to_bytes(4, "little"))


def item(i: int, size: int = 10_000, tenant: str = "") -> Item:
    view = aligned(size)
    view[:] = payload(key(i, tenant), size)
    return Item(key(i, tenant), view)


def soft_item(i: int, size: int = 10_000) -> Item:
    """One that compresses well."""
    view = aligned(size)
    view[:] = (b"%08d" % i * (size // 8 + 1))[:size]
    return Item(key(i), view)


def blank(like: Item, size: int | None = None, exact: bool = True) -> Item:
    return Item(like.key, aligned(like.view.nbytes if size is None else size, 0xAA), exact=exact)


def memory(context: TierContext, **options: Any) -> MemoryTier:
    return MemoryTier(context, **{"verify": False, **options})
