"""Examples of every operation in the published document.

Tests check that each is a valid message, and send the requests to a running app. They tell one
story (`world`), so that an answer shown is one that the requests shown lead to.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from kvstrata.api.base import Request
from kvstrata_server.examples import (
    compatible,
    drains,
    moves,
    nodes,
    placements,
    quotas,
    upkeep,
)
from kvstrata_server.examples.world import Several

__all__ = ["EXAMPLES", "show_examples"]

EXAMPLES: dict[str, tuple[Any, Any]] = {
    **nodes.EXAMPLES,
    **placements.EXAMPLES,
    **moves.EXAMPLES,
    **drains.EXAMPLES,
    **quotas.EXAMPLES,
    **upkeep.EXAMPLES,
    **compatible.EXAMPLES,
}
"""By operation the body of a request (None: it has none) and the answer, as messages, as what JSON
knows, or as text where the answer isn't JSON."""


def show_examples(operation: dict[str, Any]) -> None:
    """Put them into the document's entry of an operation: routes can't, for FastAPI would drop
    their nulls."""
    request, answer = EXAMPLES.get(operation["operationId"], (None, None))
    if isinstance(request, Several):
        operation["requestBody"]["content"]["application/json"]["examples"] = {
            name: {"value": _json(each)} for name, each in request.requests.items()
        }
    elif request is not None:
        operation["requestBody"]["content"]["application/json"]["example"] = _json(request)
    if answer is not None:
        # A dry run's 200 stands beside the 202 of what is really done.
        status = max(s for s in operation["responses"] if s.startswith("2"))
        for content in operation["responses"][status]["content"].values():
            content["example"] = _json(answer)


def _json(message: Any) -> Any:
    if isinstance(message, BaseModel):
        # An answer says null where it has nothing; a request leaves that out.
        return message.model_dump(mode="json", exclude_none=isinstance(message, Request))
    return message
