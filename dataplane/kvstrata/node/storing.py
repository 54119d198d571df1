"""Chunks that the control plane wants in a store: written back once, and told until it is heard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvstrata import api
from kvstrata.api import Outcome
from kvstrata.keys import check_keys
from kvstrata.node.answering import Answering
from kvstrata.node.reported import Reported, WriteBack, Written

__all__ = ["Storing"]

_log = logging.getLogger(__name__)

_REMEMBERED = 32


class Storing(Answering[api.StoreResult]):
    """Executes `store` commands and posts what became of their keys through
    `post(order, result)`."""

    def __init__(
        self,
        reported: Reported,
        post: Callable[[str, api.StoreResult], Awaitable[object]],
    ) -> None:
        super().__init__("order", post, _REMEMBERED)
        self._reported = reported

    async def _execute(self, command: api.Command) -> api.StoreResult:
        written, detail = Written(), ""
        try:
            keys = check_keys(bytes.fromhex(key) for key in command.keys)
            asked = WriteBack(command.transfer, keys, command.stores)
            async with asyncio.timeout(max(0.0, command.deadline_in)):
                await self._reported.write_back(asked, written)
        except TimeoutError:
            detail = "not done before its deadline"
        except Exception as e:
            # Whatever it was, nobody should have to wait for the deadline to learn of it.
            _log.warning("order %s failed", command.transfer, exc_info=True)
            detail = f"{type(e).__name__}: {e}"[:2000]
        # Where some were written the rest is worth another try; where none was, no outcomes say so.
        told = {key.hex(): outcome for key, outcome in written.outcomes.items()}
        return api.StoreResult(
            incarnation=self._reported.registration().incarnation,
            outcomes={key: told.get(key, Outcome.FAILED) for key in command.keys} if told else told,
            stores={key.hex(): store for key, store in written.stores.items()},
            detail=detail,
        )
