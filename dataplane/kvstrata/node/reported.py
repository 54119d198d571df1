"""What the reporter needs from a node, and what it hands to it.

The reporter speaks HTTP and knows no tiers; the store knows tiers and speaks no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstrata.api import HostUse, NodeRegistration, Outcome
from kvstrata.keys import Key
from kvstrata.node.placements import PlacementChange

__all__ = [
    "Drop",
    "PlacementChange",
    "Pull",
    "PullResult",
    "PullSource",
    "Reported",
    "Shed",
    "WriteBack",
    "Written",
]


@dataclass(frozen=True, slots=True)
class PullSource:
    """A node that should hold some of the keys, and its peer address (`tcp://host:port`)."""

    node: str
    address: str


@dataclass(frozen=True, slots=True)
class Pull:
    """One transfer to execute. `deadline` is in the reporter's clock (monotonic seconds).

    `sources` come best first. `hold` is how many seconds the chunks stay leased after they
    arrived. Keys past `byte_budget` bytes are `no_room`; None: no bound. `free_only`: nothing is
    evicted for them.
    """

    transfer: str
    namespaces: Sequence[bytes]
    keys: Sequence[Key]
    sources: Sequence[PullSource]
    deadline: float
    hold: float
    byte_budget: int | None = None
    free_only: bool = False


@dataclass(frozen=True, slots=True)
class PullResult:
    """What became of each key, which node it came from, and the bytes that were moved."""

    outcomes: Mapping[Key, Outcome]
    sources: Mapping[Key, str] = field(default_factory=dict)
    bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Chunks to give up: `keys`, and all of the namespaces `digests`. `tiers` are `host` and names
    of tiers; none named: host and all that this node can write to."""

    keys: Sequence[Key] = ()
    digests: frozenset[bytes] = frozenset()
    tiers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Shed:
    """Chunks to give up, the coldest first, until such `amounts` of bytes are gone: by location,
    which is `host` or the id of a store. `sizes` says which chunks, and what each counts:
    namespace and group, as keys begin, -> bytes."""

    sizes: Mapping[bytes, int]
    amounts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class WriteBack:
    """Chunks to put into a store now: the first of `stores` (ids) that takes each."""

    order: str
    keys: Sequence[Key]
    stores: Sequence[str]


@dataclass(frozen=True, slots=True)
class Written:
    """What became of each key so far, and which store each is in that is `STORED` or
    `PRESENT`."""

    outcomes: dict[Key, Outcome] = field(default_factory=dict)
    stores: dict[Key, str] = field(default_factory=dict)


class Reported(Protocol):
    """A node, as its reporter sees it. What isn't async answers at once, on the event loop."""

    draining: bool
    """Whether it takes no new chunks into host memory. Set by what the control plane says."""

    def registration(self) -> NodeRegistration: ...

    def host_use(self) -> HostUse: ...

    def health(self) -> tuple[bool, str]:
        """Whether the node is well, and if not, why."""

    def ailing(self) -> Sequence[str]:
        """Stores that are in trouble here."""

    def take_changes(self) -> Sequence[PlacementChange]:
        """What changed since the last call, or since `snapshot`. No key is in both lists."""

    def snapshot(self) -> Sequence[PlacementChange]:
        """Everything that is here now, as additions; forgets pending changes."""

    def namespace_documents(self) -> Mapping[bytes, bytes]:
        """Digest -> canonical JSON of the namespaces this node knows."""

    async def pull(self, pull: Pull) -> PullResult:
        """Execute a transfer. Cancelled when nobody wants it any more or its deadline passed."""

    def keep(self, transfer: str) -> None:
        """The server couldn't be told yet how a transfer ended: what it holds stays for a minute
        more."""

    def told(self, transfer: str) -> None:
        """The server knows: what the transfer holds is held for as long as was asked from now."""

    def release(self, transfer: str) -> None:
        """End the hold of a transfer that ended, if there is one."""

    async def drop(self, asked: Drop) -> Mapping[str, int]:
        """Drop what nobody uses; how many chunks, by tier. Raises `Malformed` on unknown tiers."""

    async def write_back(self, asked: WriteBack, written: Written) -> None:
        """Enter outcomes into `written` as they come. Raises `Malformed` on unknown stores."""

    async def shed(self, asked: Shed) -> Mapping[str, int]:
        """Give up the coldest; how many chunks, by tier. Raises `Malformed` on locations that
        are not this node's."""
