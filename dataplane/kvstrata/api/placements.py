"""What nodes report to hold, and who holds what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvstrata.api.base import MAX_INT, MAX_KEYS, NUMBER, Answer, HexKey, Keys, Name, Request

__all__ = [
    "Change",
    "LookupReply",
    "LookupRequest",
    "NamespaceInfo",
    "NamespaceList",
    "NodePlacement",
    "Report",
    "ReportReply",
    "Tally",
]


class Change(Request):
    """Chunks that appeared at or left one location of the reporting node.

    `location` is `host` or the id of one of its stores. A key in both lists is there.
    A key removed from a store is gone from it for every node that shares the store.
    """

    location: Name
    added: Keys = []
    removed: Keys = []


class Report(Request):
    """POST /v1/nodes/{id}/reports. `seq` counts from 0 in each incarnation, without gaps.

    `snapshot: first|more|last|only` marks the parts of a full list: the server replaces what it
    knew of this node when the last part is in. Parts of a snapshot are numbered like others and
    follow each other; the first one may skip numbers, since it makes up for what was lost.
    """

    incarnation: Name
    seq: Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]
    changes: Annotated[list[Change], Field(max_length=64)]
    snapshot: Literal["no", "first", "more", "last", "only"] = "no"
    namespaces: Annotated[list[str], Field(max_length=64)] = []
    """Namespace documents (canonical JSON) whose chunks are reported for the first time."""


class ReportReply(Answer):
    applied: bool
    """False: a repetition (`seq < next_seq`, harmless), or refused until a snapshot comes."""
    next_seq: int
    snapshot_wanted: bool = False


class NamespaceInfo(Answer):
    digest: str
    document: dict[str, Any] | None
    """None: chunks were reported, the document not yet."""


class NamespaceList(Answer):
    namespaces: list[NamespaceInfo]
    next: str | None = None


class LookupRequest(Request):
    """POST /v1/placements:lookup. `prefix` reads `keys` as a chain, `all` as a set."""

    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    mode: Literal["prefix", "all"] = "prefix"
    nodes: Annotated[list[Name], Field(max_length=10_000)] | None = None
    """Ask about these only; None: every node."""


class Tally(Answer):
    """Of one tier: chunks found in all, and how many from the first key on without a gap."""

    found: int
    prefix: int


class NodePlacement(Answer):
    node: str
    incarnation: str
    prefix: int
    """Leading keys this node can serve from any mix of its tiers."""
    tiers: dict[str, Tally]
    age: float
    """Seconds since this node's last accepted report or heartbeat."""
    keys: list[str] | None = None
    """`all` mode: which of the keys asked for it holds, in request order."""


class LookupReply(Answer):
    keys: int
    nodes: list[NodePlacement]
    """Best first: longest prefix (`all` mode: most keys), then the longest prefix in host
    memory, then the youngest report. Nodes that hold none of the keys are left out."""
