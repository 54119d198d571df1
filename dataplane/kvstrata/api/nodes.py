"""What nodes say of themselves, and what is known of them."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field

from kvstrata.api.base import MAX_INT, NUMBER, Answer, Detail, Flag, Name, Request, Text
from kvstrata.api.drains import DrainState

__all__ = [
    "EventsAt",
    "HeartbeatReply",
    "HeartbeatRequest",
    "HostUse",
    "NodeInfo",
    "NodeList",
    "NodeRegistration",
    "NodeState",
    "RegistrationReply",
    "StoreRef",
]


Version = Annotated[Text, Field(max_length=64)]


class StoreRef(Request):
    """A secondary tier that a node has attached. Nodes naming the same id share one store."""

    id: Name
    tier: Annotated[Text, Field(min_length=1, max_length=64)]


class EventsAt(Request):
    """Where a node publishes KV events in vLLM's format, and for what."""

    endpoint: Annotated[Text, Field(min_length=1, max_length=255)]
    """To subscribe to, as in `tcp://10.0.0.7:5557`."""
    replay: Annotated[Text, Field(max_length=255)] = ""
    """To ask for what was lost; empty: nowhere."""
    topic: Annotated[Text, Field(max_length=512)] = ""
    model: Annotated[Text, Field(max_length=512)] = ""
    """Only chunks of this model; empty: of all."""
    rank: Annotated[int, Field(ge=0, le=1 << 31), NUMBER] = 0


class NodeRegistration(Request):
    """POST /v1/nodes. Repeating it is harmless; a new incarnation voids what the old one held."""

    id: Name
    incarnation: Name
    peer_address: Annotated[Text, Field(max_length=255)] | None = None
    """Where other nodes reach its peer port (`tcp://10.0.0.7:7801`); None: can't be a source."""
    transports: list[Name] = []
    capacity_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] = 0
    stores: Annotated[list[StoreRef], Field(max_length=64)] = []
    events: Annotated[list[EventsAt], Field(max_length=64)] = []
    version: Version = ""
    """Of the node's kvstrata; empty: not said."""


class RegistrationReply(Answer):
    node: str
    incarnation: str
    heartbeat_ttl: float
    """Placements of a node silent for longer than this are no longer offered."""
    next_seq: int = 0
    """The `seq` the server expects in the next report of this incarnation.

    A node whose own count differs sends a snapshot, numbered by the larger of the two.
    """


class HostUse(Request):
    used_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
    capacity_bytes: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
    chunks: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]


class HeartbeatRequest(Request):
    """PUT /v1/nodes/{id}/heartbeat"""

    incarnation: Name
    host: HostUse
    healthy: Flag = True
    detail: Detail = ""
    ailing: Annotated[list[Name], Field(max_length=64)] = []
    """Stores that are in trouble here, so that nobody should count on this node to read them."""
    next_seq: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER] | None = None
    """`seq` of the node's next report: shows a server that lost the last ones that it did."""
    events: Annotated[list[EventsAt], Field(max_length=64)] | None = None
    """As registered: a server that has begun anew doesn't remember. None: as they were."""
    version: Version = ""
    """The same. Empty: as it was."""
    settled: Flag = False
    """It is drained, so it takes no new chunks, and has reported all that it held since it does
    not."""


class HeartbeatReply(Answer):
    snapshot_wanted: bool = False
    """The server missed a report: send everything (`Report.snapshot`)."""
    draining: bool = False
    """Take no new chunks into host memory until an answer says otherwise."""


class NodeState(enum.StrEnum):
    UP = "up"
    SILENT = "silent"  # heartbeat overdue: its placements are not offered
    GONE = "gone"  # deregistered


class NodeInfo(Answer):
    id: str
    incarnation: str
    state: NodeState
    peer_address: str | None
    transports: list[str]
    host: HostUse
    stores: list[StoreRef]
    healthy: bool
    detail: str
    heartbeat_age: float
    events: list[EventsAt] = []
    """Where it publishes KV events."""
    version: str = ""
    """Of its kvstrata, as it said; empty: not known to this server."""
    drain: DrainState | None = None
    """Of the drain in force: it can be a source, and is no target. None: there is none."""


class NodeList(Answer):
    nodes: list[NodeInfo]
    next: str | None = None
