"""vLLM's keys and ours: `hash + group` there, `namespace + group + hash` here."""

from __future__ import annotations

from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, Namespace

__all__ = ["Naming"]

_PREFIX_BYTES = DIGEST_BYTES + GROUP_BYTES


class Naming:
    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self._digest = namespace.digest
        self._sizes = {
            group.to_bytes(GROUP_BYTES, "big"): nbytes
            for group, nbytes in namespace.chunk_bytes.items()
        }

    def ours(self, key: bytes) -> bytes:
        return self._digest + key[-GROUP_BYTES:] + key[:-GROUP_BYTES]

    def theirs(self, name: bytes) -> bytes:
        return name[_PREFIX_BYTES:] + name[DIGEST_BYTES:_PREFIX_BYTES]

    def size(self, key: bytes) -> int:
        """Bytes of the chunk of a key of vLLM's."""
        return self._sizes[key[-GROUP_BYTES:]]
