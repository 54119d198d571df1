"""The `nixl` transport: one-sided reads by NVIDIA's NIXL, over RDMA or, on one host, CMA.

One agent per node, its region registered once. Reads bypass the source's processor, so nothing
there checks the lease (`checks_lease` is False): the source keeps leased ranges still, and the
checksum finds what was read too late.

What was measured with NIXL 1.5.1 and its UCX 1.2x, and decides how this is written:
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
import contextlib
import hashlib
import ipaddress
import logging
import os
import queue
import threading
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvstrata.errors import ConfigError, KVStrataError, LinkBroken, Malformed
from kvstrata.transports.base import Authorize, Read, Transport
from kvstrata.transports.waiting import until_settled

__all__ = ["NixlTransport"]

log = logging.getLogger(__name__)

BATCH_BYTES = 64 << 20
BATCH_READS = 4096
GRACE_SECONDS = 2.0

_VERSION = 1
_MAX_REMOTES = 256
_MAX_METADATA = 64 << 10
_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")


class _Remote(msgspec.Struct, frozen=True, array_like=True):
    """What `describe` packs. `place` tells hosts and namespaces apart, as CMA sees them."""

    version: int
    place: str
    rdma: bool
    metadata: Annotated[bytes, Meta(max_length=_MAX_METADATA)]
    base: Annotated[int, Meta(ge=0, lt=1 << 62)]
    length: Annotated[int, Meta(ge=0, lt=1 << 62)]


class NixlTransport(Transport):
    """Reads by NIXL's UCX backend. Needs `pip install nixl` (or `--no-deps nixl-cu12`)."""

    name: ClassVar[str] = "nixl"
    checks_lease: ClassVar[bool] = False

    def __init__(self, memory: memoryview, authorize: Authorize, listen_host: str = "") -> None:
        super().__init__(memory, authorize, listen_host)
        self._owner: _Owner | None = None
        self._closed = False

    async def start(self) -> None:
        owner = _Owner(self._memory, _import_nixl(), _is_loopback(self._listen_host))
        await asyncio.wrap_future(owner.ready)
        self._owner = owner

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
        at = _parse(remote)
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


def _import_nixl() -> Any:
    """The module with `nixl_agent`. Raises `ConfigError`."""
    # NIXL's Python part logs to standard output and turns `raiseExceptions` off for everyone.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    raise_exceptions = logging.raiseExceptions
    reasons = []
    try:
        for name in _MODULES:
            try:
                return import_module(f"{name}._api")
            except ImportError as e:
                reasons.append(f"{name}: {e}")
    finally:
        logging.raiseExceptions = raise_exceptions
    raise ConfigError(
        "transport nixl is not installed: `pip install nixl`, or `pip install --no-deps "
        f"nixl-cu12` on a host without CUDA ({'; '.join(reasons)})"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _place() -> str:
    """Equal for two processes iff one may read the other's memory by CMA, as far as names tell."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _has_rdma() -> bool:
    with contextlib.suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


def _parse(remote: bytes) -> _Remote:
    try:
        at = msgspec.msgpack.decode(remote, type=_Remote)
    except msgspec.MsgspecError as e:
        raise Malformed(f"nixl description of a source: {e}") from e
    if at.version != _VERSION:
        raise Malformed(f"nixl description of a source: version {at.version}, not {_VERSION}")
    return at


class _Pull:
    """One pull, advanced by the owner thread. `done` is settled when nothing writes any more."""

    def __init__(self, at: _Remote, reads: Sequence[Read], deadline: float) -> None:
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


class _Agent:
    """A NIXL agent with the region registered. Used by the owner thread only."""

    def __init__(self, memory: memoryview, api: Any, loopback: bool) -> None:
        self.name = f"kvstrata-{uuid.uuid4().hex}"
        self._array = np.frombuffer(memory, dtype=np.uint8)
        self.base = int(self._array.ctypes.data)
        with _environment(loopback):
            config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
            self._nixl = api.nixl_agent(self.name, config)
        self._registered = self._nixl.register_memory([(self.base, len(memory), 0, "")], "DRAM")
        self._remotes: OrderedDict[bytes, tuple[str, _Remote]] = OrderedDict()
        self._busy: Counter[bytes] = Counter()
        self.described = msgspec.msgpack.encode(
            _Remote(
                _VERSION,
                _place(),
                _has_rdma(),
                self._nixl.get_agent_metadata(),
                self.base,
                len(memory),
            )
        )

    def prepare(self, at: _Remote, rows: npt.NDArray[np.uint64]) -> Any:
        """The handle of a transfer that is yet to be posted."""
        name = self._know(at)
        local, remote = np.zeros((2, len(rows), 3), dtype=np.uint64)
        local[:, 0] = rows[:, 1] + np.uint64(self.base)
        remote[:, 0] = rows[:, 0] + np.uint64(at.base)
        local[:, 1] = remote[:, 1] = rows[:, 2]
        return self._nixl.initialize_xfer(
            "READ",
            self._nixl.get_xfer_descs(local, "DRAM"),
            self._nixl.get_xfer_descs(remote, "DRAM"),
            name,
        )

    def post(self, at: _Remote, handle: Any) -> bool:
        """Start it; whether it is already over."""
        self._busy[at.metadata] += 1
        return self._over(self._nixl.transfer(handle))

    def over(self, handle: Any) -> bool:
        """Whether a posted transfer is complete."""
        return self._over(self._nixl.check_xfer_state(handle))

    def settled(self, at: _Remote) -> None:
        """A posted transfer from there is over, well or not."""
        self._busy[at.metadata] -= 1

    def forget(self, at: _Remote) -> None:
        """Unless something is in progress from there, which forgetting would not stop."""
        if at.metadata in self._remotes and not self._busy[at.metadata]:
            del self._busy[at.metadata]
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(self._remotes.pop(at.metadata)[0])

    def close(self) -> None:
        """Destroy it: whatever was in progress writes nothing afterwards."""
        for name, _ in self._remotes.values():
            with contextlib.suppress(Exception):
                self._nixl.remove_remote_agent(name)
        with contextlib.suppress(Exception):
            self._nixl.deregister_memory(self._registered)
        self._registered = None
        # Handles refer to the inner agent; dropping ours is what runs its destructor.
        self._nixl.agent = None
        self._nixl = None
        del self._array

    def _know(self, at: _Remote) -> str:
        known = self._remotes.get(at.metadata)
        if known is None:
            try:
                told = self._nixl.add_remote_agent(at.metadata)
            except Exception as e:
                raise Malformed(f"nixl can't use the description of a source: {e}") from e
            known = (told.decode() if isinstance(told, bytes) else str(told), at)
            self._remotes[at.metadata] = known
            for _, old in list(self._remotes.values())[:-_MAX_REMOTES]:
                self.forget(old)
        self._remotes.move_to_end(at.metadata)
        return known[0]

    @staticmethod
    def _over(state: str) -> bool:
        if state == "ERR":
            raise RuntimeError("the transfer failed")
        return state == "DONE"


@contextlib.contextmanager
def _environment(loopback: bool) -> Iterator[None]:
    """UCX reads its settings from the environment when an agent is made. The user's win."""
    wanted = {"UCX_LOG_LEVEL": "fatal"}
    if loopback:
        # It would listen on every interface, whatever address the node listens on.
        wanted["UCX_NET_DEVICES"] = "lo"
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


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
        self._agent: _Agent | None = None
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
                self._accept(block=not self._pulls)
                if self._closing:
                    break
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
        self._accept(block=False)
        self._close_agent("the nixl transport was closed during a pull")

    def _accept(self, block: bool) -> None:
        while True:
            try:
                pull = self._queue.get(block)
            except queue.Empty:
                return
            block = False
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

    def _prepare(self, agent: _Agent, pull: _Pull) -> bool:
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

    def _check_reachable(self, at: _Remote) -> None:
        far = at.place != self._place and not (at.rdma and self._rdma)
        if far and "UCX_TLS" not in os.environ:
            raise LinkBroken(
                "nixl would reach this source over plain sockets, where the tcp transport is "
                "faster and safer; set UCX_TLS to insist"
            )

    # ------------------------------------------------------------ the agent's life

    def _open_agent(self) -> None:
        self._place, self._rdma = _place(), _has_rdma()
        self._agent = _Agent(self._memory, self._api, self._loopback)
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
