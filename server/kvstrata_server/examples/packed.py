"""Of bodies as msgpack: the same messages as those in JSON."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstrata.api import from_hex
from kvstrata.bulk import (
    BulkChange,
    BulkLookup,
    BulkModelLookup,
    BulkNamespaceLookup,
    BulkReport,
    runs_of,
)
from kvstrata_server.examples.world import INCARNATION, KEYS, NAMESPACE, STORE

__all__ = ["BODIES", "packed_example"]

_RUNS = runs_of(map(from_hex, KEYS))

BODIES: dict[str, msgspec.Struct] = {
    "post_report": BulkReport(
        INCARNATION,
        0,
        [
            BulkChange("host", runs_of([from_hex(KEYS[0])]), runs_of([from_hex(KEYS[1])])),
            BulkChange(STORE, _RUNS),
        ],
        namespaces=[NAMESPACE.document.decode()],
    ),
    "lookup_placements": BulkLookup(_RUNS),
}
"""By operation; no others take msgpack."""

OTHER_BODIES: dict[str, Sequence[type[msgspec.Struct]]] = {
    "lookup_placements": (BulkNamespaceLookup, BulkModelLookup),
}
"""What else those operations take."""


def packed_example(operation: str) -> str:
    """The body in hexadecimal, which text can show."""
    return msgspec.msgpack.encode(BODIES[operation]).hex()
