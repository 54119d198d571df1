"""One NIXL agent, and what it says of itself to peers."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvstrata.errors import ConfigError, Malformed

__all__ = ["Agent", "Remote", "has_rdma", "import_nixl", "parse", "place"]

_VERSION = 1
_MAX_REMOTES = 256
_MAX_METADATA = 64 << 10
_MODULES = ("nixl", "nixl_cu12", "nixl_cu13")


class Remote(msgspec.Struct, frozen=True, array_like=True):
    """What `describe` packs. `place` tells hosts and namespaces apart, as CMA sees them."""

    version: int
    place: str
    rdma: bool
    metadata: Annotated[bytes, Meta(max_length=_MAX_METADATA)]
    base: Annotated[int, Meta(ge=0, lt=1 << 62)]
    length: Annotated[int, Meta(ge=0, lt=1 << 62)]


def import_nixl() -> Any:
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


def place() -> str:
    """Equal for two processes iff one may read the other's memory by CMA, as far as names tell."""
    parts = []
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid", "/proc/self/ns/user"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(path) if "/ns/" in path else Path(path).read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def has_rdma() -> bool:
    with contextlib.suppress(OSError):
        return bool(os.listdir("/sys/class/infiniband"))
    return False


def parse(remote: bytes) -> Remote:
    try:
        at = msgspec.msgpack.decode(remote, type=Remote)
    except msgspec.MsgspecError as e:
        raise Malformed(f"nixl description of a source: {e}") from e
    if at.version != _VERSION:
        raise Malformed(f"nixl description of a source: version {at.version}, not {_VERSION}")
    return at


class Agent:
    """A NIXL agent with the region registered. Used by the owner thread only."""

    def __init__(self, memory: memoryview, api: Any, loopback: bool) -> None:
        self.name = f"kvstrata-{uuid.uuid4().hex}"
        self._array = np.frombuffer(memory, dtype=np.uint8)
        self.base = int(self._array.ctypes.data)
        with _environment(loopback):
            # NIXL's own progress thread polls without a pause: a third of a core, idle. It is
            # needed only where the source takes part in each read.
            self.polls = "UCX_TLS" not in os.environ
            config = api.nixl_agent_config(enable_prog_thread=not self.polls, backends=["UCX"])
            self._nixl = api.nixl_agent(self.name, config)
        self._registered = self._nixl.register_memory([(self.base, len(memory), 0, "")], "DRAM")
        self._remotes: OrderedDict[bytes, tuple[str, Remote]] = OrderedDict()
        self._busy: Counter[bytes] = Counter()
        self.described = msgspec.msgpack.encode(
            Remote(
                _VERSION,
                place(),
                has_rdma(),
                self._nixl.get_agent_metadata(),
                self.base,
                len(memory),
            )
        )

    def prepare(self, at: Remote, rows: npt.NDArray[np.uint64]) -> Any:
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

    def post(self, at: Remote, handle: Any) -> bool:
        """Start it; whether it is already over."""
        self._busy[at.metadata] += 1
        return self._over(self._nixl.transfer(handle))

    def over(self, handle: Any) -> bool:
        """Whether a posted transfer is complete."""
        return self._over(self._nixl.check_xfer_state(handle))

    def progress(self) -> None:
        """Let a peer connect. To be called now and then where `polls` is True."""
        self._nixl.get_new_notifs()

    def settled(self, at: Remote) -> None:
        """A posted transfer from there is over, well or not."""
        self._busy[at.metadata] -= 1

    def forget(self, at: Remote) -> None:
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

    def _know(self, at: Remote) -> str:
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
