"""Of a node that is to be stopped."""

from __future__ import annotations

from kvstrata import api
from kvstrata.api import DrainState
from kvstrata_server.examples.world import (
    CREATED,
    INCARNATION,
    KEYS,
    NAMESPACE,
    SOURCE,
    STORE,
    TARGET,
)

__all__ = ["EXAMPLES"]


def _drain(state: DrainState, remaining: int, **more: object) -> api.DrainInfo:
    size = NAMESPACE.chunk_bytes[0]
    known = {
        "id": "01a2281c5b94-6c1d0e7f92a3b845",
        "node": SOURCE,
        "incarnation": INCARNATION,
        "for": "removal",
        "state": state,
        "in_force": True,
        "may_stop": state is DrainState.DRAINED,
        "created": CREATED,
        "deadline": CREATED + 600,
        "settled": False,
        "remaining": api.Amount(chunks=remaining, bytes=remaining * size),
        "stored": {},
        "moved": {},
        "moved_bytes": 0,
        "left": [],
    }
    return api.DrainInfo.model_validate(known | more)


EXAMPLES = {
    "create_drain": (
        api.DrainRequest(for_="removal", deadline=600, targets=[TARGET]),
        _drain(DrainState.DRAINING, 2),
    ),
    "get_drain": (
        None,
        _drain(
            DrainState.DRAINED,
            0,
            ended=CREATED + 3,
            settled=True,
            moved={TARGET: 2},
            moved_bytes=2 * NAMESPACE.chunk_bytes[0],
        ),
    ),
    "cancel_drain": (
        None,
        _drain(DrainState.CANCELLED, 2, ended=CREATED + 1, in_force=False, may_stop=False),
    ),
    "post_store_result": (
        api.StoreResult(
            incarnation=INCARNATION,
            outcomes=dict.fromkeys(KEYS, api.Outcome.STORED),
            stores=dict.fromkeys(KEYS, STORE),
        ),
        api.OrderReply(wanted=False),
    ),
}
