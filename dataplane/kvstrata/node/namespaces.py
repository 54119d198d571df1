"""The namespaces a node knows."""

from __future__ import annotations

from kvstrata.errors import Missing
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, Key, Namespace

__all__ = ["Namespaces"]


class Namespaces:
    """The namespaces this node knows. Keys of others have no size, so they can't be held."""

    def __init__(self) -> None:
        self._known: dict[bytes, Namespace] = {}
        self._sizes: dict[bytes, int] = {}

    def add(self, namespace: Namespace) -> None:
        if namespace.digest in self._known:
            return
        self._known[namespace.digest] = namespace.checked()
        for group, nbytes in namespace.chunk_bytes.items():
            self._sizes[namespace.digest + group.to_bytes(GROUP_BYTES, "big")] = nbytes

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
