"""Transfers that the control plane asked this node to execute.

A command may come again, since its answer or ours may have been lost: each transfer is executed
once, and the result is kept for a while to be posted again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence

from kvstrata import api
from kvstrata.api import Outcome, TransferState
from kvstrata.backoff import Backoff
from kvstrata.errors import Busy, KVStrataError, LinkBroken, Missing, PeerRefused
from kvstrata.keys import check_keys
from kvstrata.node.reported import Pull, PullSource, Reported

__all__ = ["Puller"]

_log = logging.getLogger(__name__)

_AT_ONCE = 4
_REMEMBERED = 256
_REMEMBERED_KEYS = 1 << 18  # about 400 bytes each
# How long after its deadline a result is still worth posting.
_POST_GRACE = 30.0
# How often a result is posted that the server knows nothing of: some seconds in all. It may be the
# node that it doesn't know for a moment, which registers again; the transfer is not offered twice.
_MISSED_AT_MOST = 6


class Puller:
    """Executes `pull` commands, a few at once, and posts their results through `post`."""

    def __init__(
        self,
        reported: Reported,
        post: Callable[[api.Progress], Awaitable[api.ProgressReply]],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        at_once: int = _AT_ONCE,
    ) -> None:
        self._reported = reported
        self._post = post
        self._clock = clock
        self._sleep = sleep
        self._room = asyncio.Semaphore(at_once)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._results: OrderedDict[str, api.Progress] = OrderedDict()

    async def handle(self, commands: Sequence[api.Command]) -> None:
        """Start, repeat or stop transfers, and say so. Raises what posting raises."""
        told = [self._obey(command) for command in commands]
        for progress in told:
            await self._tell(progress)

    def _obey(self, command: api.Command) -> api.Progress:
        transfer = command.transfer
        if command.kind == "cancel":
            self._cancel(transfer)
            self._reported.release(transfer)
            return self._progress(transfer, final=True, detail="cancelled")
        if transfer in self._results:
            return self._results[transfer]
        if transfer not in self._running:
            deadline = self._clock() + command.deadline_in
            task = asyncio.create_task(self._execute(command, deadline), name=transfer)
            self._running[transfer] = task
            task.add_done_callback(lambda _: self._running.pop(transfer, None))
        return self._progress(transfer)

    async def close(self) -> None:
        """Cancel what runs and wait for it."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _execute(self, command: api.Command, deadline: float) -> None:
        transfer = command.transfer
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())), self._room:
                result = await self._reported.pull(_pull(command, deadline))
            final = self._progress(
                transfer,
                final=True,
                outcomes={key.hex(): outcome for key, outcome in result.outcomes.items()},
                sources={key.hex(): source for key, source in result.sources.items()},
                bytes=result.bytes,
                detail=result.detail,
            )
        except TimeoutError:
            final = self._progress(transfer, final=True, detail="not done before its deadline")
        except Exception as e:
            # Whatever it was, the transfer must not wait for its deadline to say so.
            _log.warning("transfer %s failed", transfer, exc_info=True)
            final = self._progress(transfer, final=True, detail=f"{type(e).__name__}: {e}")
        self._results[transfer] = final
        keys = sum(len(result.outcomes) for result in self._results.values())
        while len(self._results) > _REMEMBERED or (
            keys > _REMEMBERED_KEYS and len(self._results) > 1
        ):
            keys -= len(self._results.popitem(last=False)[1].outcomes)
        await self._deliver(final, deadline + _POST_GRACE)

    async def _deliver(self, final: api.Progress, until: float) -> None:
        backoff = Backoff()
        missed = 0
        while True:
            try:
                reply = await self._post(final)
            except (Busy, LinkBroken, Missing) as e:
                missed += isinstance(e, Missing)
                if self._clock() > until or missed >= _MISSED_AT_MOST:
                    _log.warning("gave up posting transfer %s: %s", final.transfer, e)
                    self._forget(final.transfer)
                    return
                self._reported.keep(final.transfer)
                await self._sleep(backoff.next())
            except KVStrataError as e:
                _log.warning("the result of transfer %s is refused: %s", final.transfer, e)
                self._forget(final.transfer)
                return
            else:
                self._heed(final.transfer, reply)
                return

    async def _tell(self, progress: api.Progress) -> None:
        try:
            reply = await self._post(progress)
        except (Missing, PeerRefused) as e:
            _log.info("transfer %s is not wanted: %s", progress.transfer, e)
            self._cancel(progress.transfer)
            self._forget(progress.transfer)
        else:
            if reply.state.ended:
                self._cancel(progress.transfer)
            self._heed(progress.transfer, reply)

    def _heed(self, transfer: str, reply: api.ProgressReply) -> None:
        """What ended without our result is not to be held, though no command may say so: one that
        was waiting for us is lost with a server that dies. What ended with it is held from when
        the server says that it did."""
        if reply.state in (TransferState.CANCELLED, TransferState.EXPIRED):
            self._reported.release(transfer)
        elif reply.state.ended:
            self._reported.told(transfer)

    def _forget(self, transfer: str) -> None:
        """Nobody is there to end its hold: a server that dies may have handed out what SQL had not
        got. Should it be asked for after all, it is executed again."""
        self._results.pop(transfer, None)
        self._reported.release(transfer)

    def _cancel(self, transfer: str) -> None:
        task = self._running.get(transfer)
        if task is not None:
            task.cancel()

    def _progress(
        self,
        transfer: str,
        *,
        final: bool = False,
        outcomes: Mapping[str, Outcome] | None = None,
        sources: Mapping[str, str] | None = None,
        bytes: int = 0,  # noqa: A002
        detail: str = "",
    ) -> api.Progress:
        return api.Progress(
            incarnation=self._reported.registration().incarnation,
            transfer=transfer,
            final=final,
            outcomes=dict(outcomes or {}),
            sources=dict(sources or {}),
            bytes=bytes,
            detail=detail[:2000],
        )


def _pull(command: api.Command, deadline: float) -> Pull:
    return Pull(
        transfer=command.transfer,
        namespaces=[document.encode() for document in command.namespaces],
        keys=check_keys(bytes.fromhex(key) for key in command.keys),
        sources=[PullSource(source.node, source.address) for source in command.sources],
        deadline=deadline,
        hold=command.hold,
        byte_budget=command.byte_budget,
        free_only=command.free_only,
    )
