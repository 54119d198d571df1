"""Waiting for work that other threads do to memory we must not let go of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["until_settled"]

T = TypeVar("T")


async def until_settled(work: asyncio.Future[T], abort: Callable[[], object]) -> T:
    """The result of `work`. A caller that is cancelled aborts it and still waits for its end.

    A transport's `pull` returns, in every way it can, only when nothing writes any more; an
    ordinary `await` on a thread would return at once and leave the thread writing.
    """
    cancelled = False
    while True:
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
            abort()
            continue
        break
    if cancelled:
        if not work.cancelled():
            work.exception()  # retrieved, so that nobody is told of it later
        raise asyncio.CancelledError
    return work.result()
