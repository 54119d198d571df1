"""The contract of a transport: how bytes get from one node's region into another's.

The consumer pulls. The source granted a lease first, so the ranges hold still while they are
read; the consumer writes into slots it owns and verifies checksums afterwards, because a
one-sided read of a range that changed under it succeeds without a word (NIXL over CMA and TCP
returned DONE with torn blocks when the source was writing). `kvstrata.testing.TransportTests`
is this contract as a test suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Authorize", "Read", "Transport"]

Authorize = Callable[[bytes, int, int], bool]
"""`authorize(lease, offset, nbytes)`: whether a remote holder of `lease` may read this range now.

Called from transport threads: must be thread-safe and must not block.
"""


@dataclass(frozen=True, slots=True)
class Read:
    """`nbytes` at `remote_offset` of the source's region, into `local_offset` of ours."""

    remote_offset: int
    local_offset: int
    nbytes: int


class Transport(ABC):
    """Both ends in one object: it serves our region and pulls from others'.

    Constructed as `cls(memory, authorize, listen_host)`: the node's region (a writable byte
    view), an `Authorize`, and the address to serve on; an empty host serves nobody, only pulls.

    `checks_lease` is False where the medium reads one-sidedly, past the source's processor: then
    only the lease's hold on the range and the checksum afterwards protect the reader.
    """

    name: ClassVar[str]
    checks_lease: ClassVar[bool] = True

    def __init__(self, memory: memoryview, authorize: Authorize, listen_host: str = "") -> None:
        self._memory = memory
        self._authorize = authorize
        self._listen_host = listen_host

    @abstractmethod
    async def start(self) -> None:
        """Begin to serve. Raises `ConfigError` where this host can't run the transport.

        Whoever cancels it calls `close`, which ends what was begun.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer's `pull` needs to reach us; opaque to everyone else."""

    def seen_from(self, remote: bytes, host: str) -> bytes:
        """A source's `describe()`, with its address replaced by `host`, the one we dialled.

        So that a peer's message can't make us dial anywhere else, and a source bound to every
        interface needs not know its name. Media that address by other means return it as it is.
        """
        return remote

    @abstractmethod
    async def pull(
        self, remote: bytes, lease: bytes, reads: Sequence[Read], deadline: float
    ) -> list[bool]:
        """Read all ranges; per read whether its bytes arrived.

        `remote` is the source's `describe()`, from an untrusted peer; `deadline` is in
        `time.monotonic` seconds. Returns only when nothing will write to the local ranges any
        more: on the deadline the link is torn down first. Raises `LinkBroken` if the source is
        gone or can't be reached (nothing can be assumed of the local ranges), `PeerRefused` if
        it denied the lease, `Malformed` if `remote` or its answer makes no sense.
        """

    @abstractmethod
    async def close(self) -> None:
        """Stop serving and tear down every link: nothing touches the region any more. Idempotent.

        Also after a `start` that failed or was cancelled.
        """
