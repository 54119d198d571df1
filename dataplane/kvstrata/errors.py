"""Everything that can go wrong, named after the condition.

    KVStrataError
    ├── NamespaceMismatch   two parties' KV bytes are not interchangeable; names the first field
    ├── Malformed           a message, key or file does not follow its format
    ├── Missing             the chunk, node or transfer asked for is not here
    ├── Corrupt             bytes failed verification; never served
    ├── Expired             a lease, reservation or deadline has passed
    ├── Busy                refused for now: ask again
    ├── NoSpace             no room here, even after eviction
    ├── PeerRefused         the other side understood and said no
    ├── LinkBroken          the connection is gone; the only error that drops one
    └── ConfigError         settings that cannot work, and what to change

Each class carries a `code`, its name on every wire (node messages, REST problem
documents), so that an error raised on one side is the same error on the other.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
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
    "from_code",
]


class KVStrataError(Exception):
    """Base of every error kvstrata raises on purpose."""

    code: ClassVar[str] = "error"


class NamespaceMismatch(KVStrataError):
    """Two parties would read each other's bytes wrongly.

    `field` is the path of the first field that differs, as in `groups[0].fields[0].units`.
    """

    code = "namespace_mismatch"

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Malformed(KVStrataError):
    """A message, key or file does not follow its format."""

    code = "malformed"


class Missing(KVStrataError):
    """The chunk, node, namespace or transfer asked for is not here."""

    code = "missing"


class Corrupt(KVStrataError):
    """Bytes failed verification. They are set aside, counted and never served."""

    code = "corrupt"


class Expired(KVStrataError):
    """A lease, a reservation or a deadline has passed."""

    code = "expired"


class Busy(KVStrataError):
    """Refused for now by a bound that protects the service: ask again."""

    code = "busy"


class NoSpace(KVStrataError):
    """No room here, even after evicting everything that may be evicted."""

    code = "no_space"


class PeerRefused(KVStrataError):
    """The other side understood the request and said no."""

    code = "peer_refused"


class LinkBroken(KVStrataError):
    """The connection is gone. The only error that drops a connection."""

    code = "link_broken"


class ConfigError(KVStrataError):
    """Settings that cannot work; the message says what to change."""

    code = "config"


_BY_CODE: dict[str, type[KVStrataError]] = {
    cls.code: cls
    for cls in (
        NamespaceMismatch,
        Malformed,
        Missing,
        Corrupt,
        Expired,
        Busy,
        NoSpace,
        PeerRefused,
        LinkBroken,
        ConfigError,
    )
}


def from_code(code: str, message: str) -> KVStrataError:
    """The error a remote side meant by `code`; `PeerRefused` for a code we do not know."""
    return _BY_CODE.get(code, PeerRefused)(message)
