"""What nodes report to hold, and who holds what."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvstrata.api.base import MAX_INT, MAX_KEYS, NUMBER, Answer, Flag, HexKey, Keys, Name, Request
from kvstrata.api.prompts import Prompt, having, told_by

__all__ = [
    "Change",
    "Lookup",
    "LookupReply",
    "LookupRequest",
    "NamespaceInfo",
    "NamespaceList",
    "NodePlacement",
    "Report",
    "ReportReply",
    "Tally",
    "TokenLookup",
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


_Nodes = Annotated[list[Name], Field(max_length=10_000)]


class LookupRequest(Request):
    """POST /v1/placements:lookup, by keys. `prefix` reads them as a chain, `all` as a set.

    Of a model with several groups of layers, keys of each group are in the order of its chain;
    how those of different groups are mixed doesn't matter for `tokens` in the answer.
    """

    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]
    mode: Literal["prefix", "all"] = "prefix"
    nodes: _Nodes | None = None
    """Ask about these only; None: every node."""
    return_keys: Flag = False
    """`prefix` mode: give the keys that each node's longest prefix needs."""


class TokenLookup(Request):
    """POST /v1/placements:lookup, by token ids. The keys are those of the prompt's chunks that a
    prefix may need, in the order in which they end, and then of their groups."""

    tokens: Prompt
    nodes: _Nodes | None = None
    """Ask about these only; None: every node."""
    return_keys: Flag = False
    """Give the keys that each node's longest prefix needs."""


Lookup = Annotated[
    Annotated[TokenLookup, having("tokens")] | Annotated[LookupRequest, having("keys")],
    told_by("tokens", "keys"),
]


class Tally(Answer):
    """Of one tier: chunks found in all, and how many from the first key on without a gap."""

    found: int
    prefix: int
    tokens: int | None = None
    """As `NodePlacement.tokens`, with this tier alone."""


class NodePlacement(Answer):
    node: str
    incarnation: str
    prefix: int
    """Leading keys this node can serve from any mix of its tiers: all of them, whatever their
    groups need."""
    tokens: int | None = None
    """Leading tokens that an engine need not compute with what this node has in any mix of its
    tiers. There it has all chunks of groups of full attention, of a sliding window those that
    cover the last `window` - 1 tokens, of states the last; it is where chunks of all groups end.
    None where that isn't known: the namespace's document wasn't reported, or keys of one of its
    groups, or of several namespaces, were asked for."""
    tiers: dict[str, Tally]
    age: float
    """Seconds since this node's last accepted report or heartbeat."""
    namespace: str | None = None
    """By token ids: the digest of the namespace that this is about. A node that holds chunks of
    several has an entry for each."""
    keys: list[str] | None = None
    """`all` mode: which of the keys asked for it holds, in request order. With `return_keys`: those
    that `tokens` need (`prefix`, where that is None), so that they may be moved or leased; given
    for the best nodes, up to 65,536 keys in all."""


class LookupReply(Answer):
    keys: int
    """Keys asked for; by token ids, of chunks that a prefix may need."""
    nodes: list[NodePlacement]
    """Best first: most tokens or, where they aren't known, longest prefix (`all` mode: most keys),
    then the same in host memory, then the youngest report. Nodes that hold none of the keys are
    left out."""
    refused: dict[str, str] = {}
    """Digests of the model's namespaces whose hashes this server can't compute, or of which the
    tokens are too many chunks, and why. Where that is so of all the request fails."""
