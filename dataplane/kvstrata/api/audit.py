"""Who changed what."""

from __future__ import annotations

from kvstrata.api.base import Answer

__all__ = ["AuditEntry", "AuditList"]


class AuditEntry(Answer):
    """One act that changed state. `actor` is the token's name, `operation` is named as in the
    API's document, `subject` is the path of what it was about: of a transfer, say, that it made.
    `status` is the HTTP status answered."""

    id: int
    time: float
    actor: str
    client: str
    operation: str
    subject: str
    status: int


class AuditList(Answer):
    entries: list[AuditEntry]
    next: int | None = None
