"""Waiting for what another task, thread or process does, where nothing tells of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from kvstrata.errors import KVStrataError

__all__ = ["eventually", "until"]

T = TypeVar("T")


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once it holds; other tasks run meanwhile. `AssertionError` if it never does."""
    try:
        async with asyncio.timeout(seconds):
            while not condition():  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"it did not come to hold within {seconds:g} s") from None


def eventually(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """The first true value of `condition`; an error of ours means not yet.

    `AssertionError`, with the last of those errors, if there is none.
    """
    deadline = time.monotonic() + seconds
    trouble: object = "the condition stayed false"
    while time.monotonic() < deadline:
        try:
            if value := condition():
                return value
        except KVStrataError as e:
            trouble = e
        time.sleep(0.05)
    raise AssertionError(f"did not happen within {seconds:g} s: {trouble}")
