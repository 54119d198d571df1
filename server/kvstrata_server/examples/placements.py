"""Of who holds what."""

from __future__ import annotations

import json

from kvstrata import api
from kvstrata_server.examples.world import (
    INCARNATION,
    KEYS,
    MODEL,
    NAMESPACE,
    SOURCE,
    STORE,
    TOKENS,
    Several,
)

__all__ = ["EXAMPLES"]

_CURSOR = "7f3a9c1d:118"


def _event(kind: str, cursor: str, **data: object) -> str:
    return f"id: {cursor}\nevent: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"


def _line(**data: object) -> str:
    return json.dumps(data, separators=(",", ":")) + "\n"


EXAMPLES = {
    "lookup_placements": (
        Several(
            {
                "keys": api.LookupRequest(keys=KEYS),
                "tokens": api.TokenLookup(tokens=api.ModelTokens(model=MODEL, token_ids=TOKENS)),
            }
        ),
        api.LookupReply(
            keys=2,
            nodes=[
                api.NodePlacement(
                    node=SOURCE,
                    incarnation=INCARNATION,
                    prefix=2,
                    tokens=32,
                    tiers={
                        "fs": api.Tally(found=2, prefix=2, tokens=32),
                        "host": api.Tally(found=1, prefix=1, tokens=16),
                    },
                    age=0.4,
                )
            ],
        ),
    ),
    "list_namespaces": (
        None,
        api.NamespaceList(
            namespaces=[
                api.NamespaceInfo(
                    digest=NAMESPACE.digest.hex(), document=json.loads(NAMESPACE.document)
                )
            ]
        ),
    ),
    "stream_events": (
        None,
        _event("start", _CURSOR)
        + _event("placements", "7f3a9c1d:119", node=SOURCE, location="host", removed=[], added=KEYS)
        + _event("voided", "7f3a9c1d:120", node=SOURCE, location="host"),
    ),
    "take_snapshot": (
        None,
        _line(cursor=_CURSOR)
        + _line(node=SOURCE, stores={STORE: "fs"})
        + _line(node=SOURCE, location="host", keys=KEYS[:1])
        + _line(node=SOURCE, location=STORE, keys=KEYS)
        + _line(end=True),
    ),
}
