"""Chunks that nodes are asked to give up."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field

from kvstrata.api.base import (
    MAX_INT,
    MAX_KEYS,
    NUMBER,
    Answer,
    Detail,
    Flag,
    HexKey,
    Name,
    Request,
    Text,
)
from kvstrata.api.prompts import having, told_by

__all__ = [
    "EvictionInfo",
    "EvictionList",
    "EvictionRequest",
    "EvictionResult",
    "EvictionState",
    "NodeEviction",
    "OfKeys",
    "OfModel",
    "OfNamespaces",
]


class EvictionState(enum.StrEnum):
    """running -> done | partial | expired. `done`: every node said what it dropped. `partial`: some
    node could not. `expired`: some node said nothing before the deadline; it may do it yet."""

    RUNNING = "running"
    DONE = "done"
    PARTIAL = "partial"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        return self is not EvictionState.RUNNING


MAX_NODES = 2_000
"""Most nodes that one eviction asks: each of their answers is in it."""


class OfKeys(Request):
    """Just these chunks."""

    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]


class OfNamespaces(Request):
    """All chunks of namespaces, by their digests."""

    digests: Annotated[
        list[Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]], Field(min_length=1, max_length=1000)
    ]


class OfModel(Request):
    """All chunks of a model, or of one revision of its weights."""

    model: Annotated[Text, Field(min_length=1, max_length=512)]
    revision: Annotated[Text, Field(min_length=1, max_length=512)] | None = None


class EvictionRequest(Request):
    """POST /v1/evictions: have nodes give chunks up, as after new weights or on a tenant's request.

    `tiers` are `host` and names of a node's tiers; None: all it can write to. `nodes` None: all
    that are up. Chunks that are leased stay. Nothing keeps engines from storing them anew.
    """

    chunks: Annotated[
        Annotated[OfKeys, having("keys")]
        | Annotated[OfNamespaces, having("digests")]
        | Annotated[OfModel, having("model")],
        told_by("keys", "digests", "model"),
    ]
    nodes: Annotated[list[Name], Field(min_length=1, max_length=MAX_NODES)] | None = None
    tiers: Annotated[list[Name], Field(min_length=1, max_length=64)] | None = None
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0


class NodeEviction(Answer):
    """At one node. `dropped` is None until it has said so, then chunks by tier."""

    node: str
    dropped: dict[str, int] | None = None
    detail: str = ""
    """Why it could not, if it couldn't."""
    reported: bool = False
    """Whether the index knows of what it dropped."""


class EvictionInfo(Answer):
    id: str
    """Sorts by time of creation."""
    state: EvictionState
    created: float
    deadline: float
    ended: float | None = None
    nodes: list[NodeEviction]


class EvictionList(Answer):
    evictions: list[EvictionInfo]
    next: str | None = None


class EvictionResult(Request):
    """POST /v1/nodes/{id}/evictions/{eviction}: what the node dropped, or why it could not."""

    incarnation: Name
    dropped: Annotated[
        dict[Name, Annotated[int, Field(ge=0, le=MAX_INT), NUMBER]] | None, Field(max_length=64)
    ] = None
    detail: Detail = ""
    reported: Flag = False
    """Whether reports of all that it dropped were applied before this."""
