"""The server's own state."""

from __future__ import annotations

from typing import Literal

from kvstrata.api.base import Answer

__all__ = ["Health", "TaskHealth"]


class TaskHealth(Answer):
    """A background task of the server."""

    name: str
    healthy: bool
    detail: str = ""


class Health(Answer):
    """GET /healthz and /readyz: open without a token."""

    status: Literal["ok", "degraded"]
    version: str
    tasks: list[TaskHealth]
    restarts: int
    """How often a task failed and began anew."""
    unwritten_rows: int
    """Rows of the index that SQL doesn't have yet."""
