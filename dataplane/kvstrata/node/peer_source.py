"""What a peer port needs from the node whose chunks it lends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstrata.keys import Key, Namespace

__all__ = ["Grant", "GrantedChunk", "PeerSource"]


@dataclass(frozen=True, slots=True)
class GrantedChunk:
    """A leased chunk: its byte range in the region and the xxh3-64 of its bytes."""

    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Grant:
    """`lease` is 16 random bytes, `ttl` seconds; `chunks[i]` answers `keys[i]`, None: not here."""

    lease: bytes
    ttl: float
    chunks: list[GrantedChunk | None]


class PeerSource(Protocol):
    """The node's side. `peer` names one session of one peer; it is unique in this process.

    All but `authorize` are called on the event loop.
    """

    def namespaces(self) -> list[Namespace]:
        """Those whose chunks this node may hold."""
        ...

    def probe(self, keys: Sequence[Key]) -> list[bool]:
        """Which can be had. Must neither renew nor promote anything."""
        ...

    async def grant(self, peer: str, keys: Sequence[Key], ttl: float, wait: float) -> Grant:
        """Lease what is here, or can be brought into the region within `wait` seconds.

        The ranges must hold still until the lease is released, its peer is gone or `ttl` has
        passed. May be cancelled (the peer left): then nothing stays leased.
        """
        ...

    def release_grant(self, peer: str, lease: bytes) -> None:
        """An unknown lease, or another peer's, is ignored."""
        ...

    def peer_gone(self, peer: str) -> None:
        """Release all it holds. Called once for each peer that was granted anything, or asked."""
        ...

    def authorize(self, lease: bytes, offset: int, nbytes: int) -> bool:
        """Whether the lease, now, covers this range. Called by any thread; must not block."""
        ...
