"""The namespaces a node knows."""

from __future__ import annotations

from collections.abc import Container

from kvstrata.errors import Missing
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, Key, Namespace

__all__ = ["Namespaces"]


# Each tenant has its own of each model; a document has some kilobytes.
_MOST = 4096


class Namespaces:
    """The namespaces this node knows. Keys of others have no size, so they can't be held."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = self._crowd = most
        # The one that was added last is last.
        self._known: dict[bytes, Namespace] = {}
        self._sizes: dict[bytes, int] = {}

    def add(self, namespace: Namespace) -> None:
        known = self._known.pop(namespace.digest, None)
        if known is not None:
            self._known[namespace.digest] = known
            return
        self._known[namespace.digest] = namespace.checked()
        for group, nbytes in namespace.chunk_bytes.items():
            self._sizes[namespace.digest + group.to_bytes(GROUP_BYTES, "big")] = nbytes

    @property
    def crowded(self) -> bool:
        """Whether `prune` has something to do."""
        return len(self._known) > self._crowd

    def prune(self, used: Container[bytes]) -> None:
        """Forget the oldest beyond the most there may be, but for the digests in `used`. Whoever
        comes back with one brings its document."""
        idle = [digest for digest in self._known if digest not in used]
        for digest in idle[: max(0, len(self._known) - self._most)]:
            for group in self._known.pop(digest).chunk_bytes:
                del self._sizes[digest + group.to_bytes(GROUP_BYTES, "big")]
        # Where all of them are in use, there is no point in looking again at once.
        self._crowd = max(self._most, len(self._known) * 5 // 4)

    def get(self, digest: bytes) -> Namespace | None:
        return self._known.get(digest)

    def all(self) -> list[Namespace]:
        return list(self._known.values())

    def size_of(self, key: Key) -> int:
        """Bytes of the chunk of `key`. Raises `Missing` for a namespace or group not known."""
        nbytes = self._sizes.get(key[: DIGEST_BYTES + GROUP_BYTES])
        if nbytes is None:
            digest = key[:DIGEST_BYTES]
            what = "no group of namespace" if digest in self._known else "no namespace"
            raise Missing(f"{what} {digest.hex()} is registered at this node")
        return nbytes
