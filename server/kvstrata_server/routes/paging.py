"""Parameters that many routes share."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query

__all__ = ["After", "Limit", "NodeId"]

After = Annotated[
    str | None, Query(max_length=128, description="Cursor: `next` of the page before")
]
Limit = Annotated[int, Query(ge=1, le=1000, description="Most entries of a page")]
NodeId = Annotated[str, Path(max_length=128)]
