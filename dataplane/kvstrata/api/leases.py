"""Chunks that stay in host memory for a while."""

from __future__ import annotations

import enum
from typing import Annotated

from pydantic import Field

from kvstrata.api.base import MAX_KEYS, NUMBER, Answer, HexKey, Name, Request
from kvstrata.api.prompts import Prompt, having, told_by
from kvstrata.api.transfers import KeyOutcome

__all__ = ["Lease", "LeaseInfo", "LeaseRequest", "LeaseState", "TokenLease"]


class _Terms(Request):
    """Of all leases."""

    ttl: Annotated[float, Field(gt=0, le=3600), NUMBER] = 60.0
    deadline: Annotated[float, Field(gt=0, le=3600), NUMBER] = 10.0


class LeaseRequest(_Terms):
    """POST /v1/leases: keep chunks in a node's host memory for `ttl` seconds, whatever else comes.

    What isn't there is promoted from the node's own tiers, within `deadline` seconds.
    """

    node: Name
    keys: Annotated[list[HexKey], Field(min_length=1, max_length=MAX_KEYS)]


class TokenLease(_Terms):
    """POST /v1/leases, by token ids, which are as in `TokenTransfer`. The rest is as in
    `LeaseRequest`."""

    node: Name
    tokens: Prompt


Lease = Annotated[
    Annotated[TokenLease, having("tokens")] | Annotated[LeaseRequest, having("keys")],
    told_by("tokens", "keys"),
]


class LeaseState(enum.StrEnum):
    """pending -> held -> ended. `held`: the keys of the answer that are `stored` or `present`
    can't be evicted there until `expires`. A lease that got none of its keys ends at once."""

    PENDING = "pending"
    HELD = "held"
    ENDED = "ended"


class LeaseInfo(Answer):
    id: str
    """Also that of the transfer that brings the chunks up."""
    state: LeaseState
    node: str
    expires: float | None = None
    """When it ends by itself, or did; None while it is pending, and if it holds nothing."""
    keys: list[KeyOutcome]
