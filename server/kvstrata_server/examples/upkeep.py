"""Of what people who run it ask."""

from __future__ import annotations

from kvstrata import api
from kvstrata_server.examples.world import CREATED, TRANSFER

__all__ = ["EXAMPLES"]

_WORKING = api.TaskHealth(name="writer", healthy=True)

EXAMPLES = {
    "list_audit": (
        None,
        api.AuditList(
            entries=[
                api.AuditEntry(
                    id=31,
                    time=CREATED,
                    actor="router",
                    client="10.0.0.2",
                    operation="cancel_transfer",
                    subject=f"/v1/transfers/{TRANSFER}",
                    status=200,
                )
            ],
            next=31,
        ),
    ),
    "get_health": (
        None,
        api.Health(status="ok", version="0.1.0", tasks=[_WORKING], restarts=0, unwritten_rows=2048),
    ),
    "get_readiness": (
        None,
        api.Health(status="ok", version="0.1.0", tasks=[_WORKING], restarts=0, unwritten_rows=0),
    ),
    "get_metrics": (
        None,
        "# HELP kvstrata_index_placements Chunks times locations\n"
        "# TYPE kvstrata_index_placements gauge\n"
        "kvstrata_index_placements 3.0\n",
    ),
}
