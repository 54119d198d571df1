"""The `nixl` transport: one-sided reads by NVIDIA's NIXL, over RDMA or, on one host, CMA.

One agent per node, its region registered once. Reads bypass the source's processor, so nothing
there checks the lease (`checks_lease` is False): the source keeps leased ranges still, and the
checksum finds what was read too late.

What was measured with NIXL 1.5.1, and decides how this is written:
  - With CMA a transfer is one synchronous copy in the caller's thread: all calls are made by
    one owner thread, and a pull goes in batches of `BATCH_BYTES` so that deadlines are met and
    concurrent pulls share.
  - Releasing a transfer that is in progress reports success, and so does removing the remote
    agent; 64 MiB then landed a second later when the source came back. Only destroying the
    agent stops it. So a transfer that is still running `GRACE_SECONDS` after its deadline
    costs the whole agent, and a new one takes over: peers have to shake hands again.
  - Over plain TCP sockets UCX reads at a third of the `tcp` transport's rate, and a source
    that was paused while its reader died aborted in 1 of 3 runs (an assertion in UCX). So a
    source that could only be reached that way is refused, unless UCX_TLS says it is wanted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvstrata.addresses import is_loopback
from kvstrata.errors import ConfigError, KVStrataError, LinkBroken, Malformed
from kvstrata.transports.base import Authorize, Read, Transport
from kvstrata.transports.nixl_agent import Agent, Remote, has_rdma, import_nixl, parse, place
from kvstrata.transports.waiting import until_settled

__all__ = ["NixlTransport"]

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
BATCH_READS = 4096
GRACE_SECONDS = 2.0

# A peer's first read waits for this; later ones need nothing of the source.
_IDLE_POLL_SECONDS = 0.002


class NixlTransport(Transport):
    """Reads by NIXL's UCX backend. Needs `pip install nixl` (or `--no-deps nixl-cu12`)."""

    name: ClassVar[str] = "nixl"
    checks_lease: ClassVar[bool] = False

    def __init__(self, memory: memoryview, authorize: Authorize, listen_host: str = "") -> None:
        super().__init__(memory, authorize, listen_host)
        self._owner: _Owner | None = None
        self._closed = False

    async def start(self) -> None:
        # It takes half a second, in which the loop has others to serve.
        api = await asyncio.to_thread(import_nixl)
        # Ours from the first moment: a start that is cancelled leaves it to `close`, since its
        # thread goes on in C++ until the agent is there.
        self._owner = _Owner(self._memory, api, is_loopback(self._listen_host))
        try:
            await asyncio.shield(asyncio.wrap_future(self._owner.ready))
        except ConfigError:
            self._owner = None
            raise

    def describe(self) -> bytes:
        if self._owner is None or not self._listen_host:
            return b""
        return self._owner.described

    async def pull(
        self, remote: bytes, lease: bytes, reads: Sequence[Read], deadline: float
    ) -> list[bool]:
        owner = self._owner
        if self._closed or owner is None:
            raise LinkBroken("the nixl transport is closed")
        at = parse(remote)
        for read in reads:
            if not 0 <= read.local_offset <= read.local_offset + read.nbytes <= len(self._memory):
                raise ValueError(f"{read} is outside the region")
            if not 0 <= read.remote_offset <= read.remote_offset + read.nbytes <= at.length:
                raise Malformed(f"{read} is outside the source's region of {at.length} bytes")
        if not reads:
            return []
        pull = _Pull(at, reads, deadline)
        owner.submit(pull)
        return await until_settled(asyncio.wrap_future(pull.done), pull.abort)

    async def close(self) -> None:
        self._closed = True
        owner, self._owner = self._owner, None
        if owner is not None:
            await asyncio.to_thread(owner.close)


class _Pull:
    """One pull, advanced by the owner thread. `done` is settled when nothing writes any more."""

    def __init__(self, at: Remote, reads: Sequence[Read], deadline: float) -> None:
        self.at = at
        self.deadline = deadline
        self.done: Future[list[bool]] = Future()
        self.handle: Any = None
        self.aborted = False
        self._arrived = [False] * len(reads)
        self._table = np.array(
            [(r.remote_offset, r.local_offset, r.nbytes) for r in reads], dtype=np.uint64
        )
        self._begun = self._settled = 0

    def abort(self) -> None:
        """Ask it to end: at the next batch, or when the one in progress is over."""
        self.aborted = True

    def next_batch(self) -> npt.NDArray[np.uint64] | None:
        """Rows (remote offset, local offset, bytes) to read now; None after the last."""
        start = self._begun
        if start == len(self._table):
            return None
        sizes = np.cumsum(self._table[start : start + BATCH_READS, 2])
        fit = int(np.searchsorted(sizes, BATCH_BYTES, side="right"))
        self._begun = start + max(1, fit)
        return self._table[start : self._begun]

    def batch_arrived(self) -> None:
        self._arrived[self._settled : self._begun] = [True] * (self._begun - self._settled)
        self._settled = self._begun

    def finish(self, error: KVStrataError | None = None) -> None:
        if error is not None:
            self.done.set_exception(error)
        else:
            self.done.set_result(self._arrived)


def _broken(error: Exception) -> LinkBroken:
    return LinkBroken(f"nixl source: {type(error).__name__}: {error}")


class _Owner:
    """The thread that makes every call of the agent."""

    def __init__(self, memory: memoryview, api: Any, loopback: bool) -> None:
        self._memory = memory
        self._api = api
        self._loopback = loopback
        self._disconnected: type[Exception] = api.nixlBind.nixlRemoteDisconnectError
        self._queue: queue.SimpleQueue[_Pull | None] = queue.SimpleQueue()
        self._pulls: list[_Pull] = []
        self._lock = threading.Lock()
        self._closing = False
        self._agent: Agent | None = None
        self.described = b""
        self.ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="kvstrata-nixl", daemon=True)
        self._thread.start()

    def submit(self, pull: _Pull) -> None:
        with self._lock:
            if self._closing:
                raise LinkBroken("the nixl transport is closed")
            self._queue.put(pull)

    def close(self) -> None:
        with self._lock:
            self._closing = True
            self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._open_agent()
        except Exception as e:
            self.ready.set_exception(ConfigError(f"transport nixl can't start here: {e!r}"))
            return
        self.ready.set_result(None)
        pause = 0.0
        while True:
            try:
                self._accept(wait=0 if self._pulls else _IDLE_POLL_SECONDS)
                if self._closing:
                    break
                if self._agent is not None and self._agent.polls:
                    self._agent.progress()
                moved = [self._advance(pull) for pull in self._pulls]
            except Exception as e:
                log.exception("transport nixl: restarting its agent")
                self._replace_agent(f"internal error: {e!r}")
                moved = []
            self._pulls = [pull for pull in self._pulls if not pull.done.done()]
            # Poll fast while it is worth it, then without burning a core.
            pause = 0.0 if any(moved) or not self._pulls else min(0.001, pause + 0.00002)
            if pause:
                time.sleep(pause)
        self._accept(wait=0)
        self._close_agent("the nixl transport was closed during a pull")

    def _accept(self, wait: float) -> None:
        while True:
            try:
                pull = self._queue.get(wait > 0, wait)
            except queue.Empty:
                return
            wait = 0
            if pull is not None:
                self._pulls.append(pull)

    def _advance(self, pull: _Pull) -> bool:
        """Move one pull on by a batch or a poll; whether anything happened."""
        if pull.done.done():
            return False
        agent = self._agent
        if agent is None:
            pull.finish(LinkBroken("the nixl transport could not be started again"))
            return True
        posted = pull.handle is not None
        try:
            # Until it is posted, whatever goes wrong is this pull's alone.
            if not posted and not self._prepare(agent, pull):
                return True
        except Exception as e:
            agent.forget(pull.at)
            pull.finish(e if isinstance(e, KVStrataError) else _broken(e))
            return True
        try:
            over = agent.over(pull.handle) if posted else agent.post(pull.at, pull.handle)
        except self._disconnected as e:
            # The endpoint is closed, and with it every transfer from there.
            pull.handle = None
            agent.settled(pull.at)
            agent.forget(pull.at)
            pull.finish(_broken(e))
            return True
        except Exception as e:
            # Parts of the transfer may still be under way.
            self._replace_agent(f"a transfer failed: {type(e).__name__}: {e}")
            return True
        if over:
            handle, pull.handle = pull.handle, None
            handle.release()
            agent.settled(pull.at)
            pull.batch_arrived()
            return True
        late = time.monotonic() - pull.deadline
        if late > GRACE_SECONDS or (pull.aborted and late > 0):
            self._replace_agent("a transfer did not end in time, and took its agent with it")
        return not posted

    def _prepare(self, agent: Agent, pull: _Pull) -> bool:
        """Make its next transfer ready, or settle it."""
        rows = None
        if pull.aborted:
            raise LinkBroken("the pull was given up")
        if time.monotonic() < pull.deadline:
            self._check_reachable(pull.at)
            rows = pull.next_batch()
        if rows is None:
            pull.finish()
            return False
        pull.handle = agent.prepare(pull.at, rows)
        return True

    def _check_reachable(self, at: Remote) -> None:
        far = at.place != self._place and not (at.rdma and self._rdma)
        if far and "UCX_TLS" not in os.environ:
            raise LinkBroken(
                "nixl would reach this source over plain sockets, where the tcp transport is "
                "faster and safer; set UCX_TLS to insist"
            )

    # ------------------------------------------------------------ the agent's life

    def _open_agent(self) -> None:
        self._place, self._rdma = place(), has_rdma()
        self._agent = Agent(self._memory, self._api, self._loopback)
        self.described = self._agent.described

    def _close_agent(self, reason: str) -> None:
        agent, self._agent = self._agent, None
        pulls, self._pulls = self._pulls, []
        for pull in pulls:
            if pull.handle is not None:
                # Not `release`: it would try to cancel, and the agent's end does.
                pull.handle._released = True
                pull.handle = None
        if agent is not None:
            agent.close()
        for pull in pulls:
            if not pull.done.done():
                late = time.monotonic() >= pull.deadline
                pull.finish(None if late else LinkBroken(f"nixl source: {reason}"))

    def _replace_agent(self, reason: str) -> None:
        log.warning("transport nixl: %s", reason)
        self._close_agent(reason)
        try:
            self._open_agent()
        except Exception:
            log.exception("transport nixl: no new agent; it is off until the node restarts")
            self.described = b""
