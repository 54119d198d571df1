"""Evictions that the control plane asked for: dropped once, and said until it is heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvstrata import api
from kvstrata.keys import DIGEST_BYTES, GROUP_BYTES, check_keys
from kvstrata.node.answering import Answering
from kvstrata.node.reported import Drop, Reported, Shed

__all__ = ["Evicting"]

_log = logging.getLogger(__name__)

_REMEMBERED = 256
# Seconds until what was dropped is reported, mostly much less.
_REPORTING = 5.0


class Evicting(Answering[api.EvictionResult]):
    """Executes `evict` and `shed` commands and posts what they dropped through
    `post(eviction, result)`.

    Who asks for so many bytes asks again where the index still has them. So what a `shed` dropped
    is said after it was reported (`all_reported` waits for that), or that it isn't yet.
    """

    def __init__(
        self,
        reported: Reported,
        post: Callable[[str, api.EvictionResult], Awaitable[object]],
        all_reported: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__("eviction", post, _REMEMBERED)
        self._reported = reported
        self._all_reported = all_reported

    async def _execute(self, command: api.Command) -> api.EvictionResult:
        incarnation = self._reported.registration().incarnation
        loop = asyncio.get_running_loop()
        deadline = loop.time() + command.deadline_in
        try:
            async with asyncio.timeout(max(0.0, command.deadline_in)):
                if command.kind == "shed":
                    dropped = await self._reported.shed(_shed(command))
                else:
                    dropped = await self._reported.drop(_drop(command))
        except TimeoutError:
            detail = "not done before its deadline"
        except Exception as e:
            # Whatever it was, nobody should have to wait for the deadline to learn of it.
            _log.warning("eviction %s failed", command.transfer, exc_info=True)
            detail = f"{type(e).__name__}: {e}"[:2000]
        else:
            told = command.kind == "shed" and await self._is_told(deadline - loop.time())
            return api.EvictionResult(incarnation=incarnation, dropped=dict(dropped), reported=told)
        return api.EvictionResult(incarnation=incarnation, detail=detail)

    async def _is_told(self, left: float) -> bool:
        """Whether all is reported, in good time before the deadline."""
        try:
            async with asyncio.timeout(min(_REPORTING, left / 2)):
                await self._all_reported()
        except TimeoutError:
            return False
        return True


def _drop(command: api.Command) -> Drop:
    return Drop(
        keys=check_keys(bytes.fromhex(key) for key in command.keys),
        digests=frozenset(_digest(text) for text in command.digests),
        tiers=tuple(command.tiers),
    )


def _shed(command: api.Command) -> Shed:
    sizes = {bytes.fromhex(text): size for text, size in command.sizes.items()}
    if any(len(each) != DIGEST_BYTES + GROUP_BYTES or sizes[each] < 1 for each in sizes):
        raise ValueError("`sizes` are of namespaces with their groups, and of a byte or more")
    return Shed(sizes, command.amounts)


def _digest(text: str) -> bytes:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"{text[:80]!r} is no namespace digest")
    return digest
