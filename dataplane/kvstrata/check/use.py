"""What a store is used for: chunks and bytes by namespace, tenant and age."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstrata.keys import Namespace

__all__ = ["AGES", "Use", "UseReport"]

AGES: Sequence[tuple[str, float]] = (
    ("1 h", 3600.0),
    ("1 d", 86_400.0),
    ("7 d", 7 * 86_400.0),
    ("30 d", 30 * 86_400.0),
    ("older", float("inf")),
)
"""Buckets of how long ago a chunk was last used: up to so many seconds."""


@dataclass
class Use:
    """Chunks, and the bytes that they take of the medium, in all and by age."""

    chunks: int = 0
    bytes: int = 0
    by_age: list[int] = field(default_factory=lambda: [0] * len(AGES))

    def add(self, nbytes: int, age: float) -> None:
        self.chunks += 1
        self.bytes += nbytes
        bucket = next(i for i, (_, most) in enumerate(AGES) if age <= most)
        self.by_age[bucket] += nbytes

    def merge(self, other: Use) -> None:
        self.chunks += other.chunks
        self.bytes += other.bytes
        self.by_age = [a + b for a, b in zip(self.by_age, other.by_age, strict=True)]


@dataclass
class UseReport:
    """By namespace digest (hex); `documents` has what is known of each.

    `other_bytes` is what is not chunks: quarantine, files being written, leases, news.
    """

    store: str
    id: str = ""
    namespaces: dict[str, Use] = field(default_factory=dict)
    documents: dict[str, Namespace | None] = field(default_factory=dict)
    other_bytes: int = 0

    def total(self) -> Use:
        total = Use()
        for use in self.namespaces.values():
            total.merge(use)
        return total

    def by_tenant(self) -> dict[str | None, Use]:
        """None stands for namespaces that nobody has described."""
        tenants: dict[str | None, Use] = {}
        for digest, use in self.namespaces.items():
            document = self.documents.get(digest)
            tenant = None if document is None else document.tenant
            tenants.setdefault(tenant, Use()).merge(use)
        return tenants
