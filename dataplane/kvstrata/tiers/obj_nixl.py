"""Loading payloads through NIXL's OBJ plugin, whose HTTP is no Python.

It reads bytes only: metadata are asked for first, and what came is verified against them. A read
can't be taken back, so it lands in a buffer of its own, from which it is copied once it is whole;
a buffer whose read was given up is used again only when NIXL says that the read has ended. What
NIXL fails at, whoever calls can still load in the usual way.
"""

from __future__ import annotations

import asyncio
import itertools
import mmap
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvstrata.errors import ConfigError
from kvstrata.tiers.obj_conditions import NixlFailed
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.transports.nixl_agent import import_nixl

__all__ = ["NixlReader"]

_FIRST_POLL, _LONGEST_POLL = 0.0002, 0.005
_MOST_GIVEN_UP = 64

_STAY: list[NixlReader] = []


@dataclass(slots=True)
class _Buffer:
    memory: memoryview
    address: int


@dataclass(slots=True)
class _Read:
    """One under way, and all that must stay for as long as it is."""

    handle: Any
    registered: Any
    buffer: _Buffer


class NixlReader:
    """For one event loop, whose thread owns the agent."""

    def __init__(self, options: ObjOptions, credentials: Sequence[str]) -> None:
        """With no credentials the AWS SDK inside the plugin looks for them in its own usual chain.

        Raises `ConfigError` if NIXL or its plugin isn't there.
        """
        api = import_nixl()
        try:
            # The SDK has threads of its own, so nothing has to be kept going.
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = api.nixl_agent(f"kvstrata-{uuid.uuid4().hex}", config)
            self._agent.create_backend("OBJ", _parameters(options, credentials))
        except Exception as e:  # of NIXL's own kinds, which share no base
            raise ConfigError(f"obj tier: NIXL's OBJ plugin: {type(e).__name__}: {e}") from e
        self._name = self._agent.name
        self._ids = itertools.count(1)
        self._free: dict[int, list[_Buffer]] = {}
        self._given_up: list[_Read] = []
        self._lost: list[_Buffer] = []

    def close(self) -> None:
        """Reads that were given up may still write: their buffers then stay until the end."""
        self._collect()
        if self._given_up or self._lost:
            _STAY.append(self)

    async def read(self, name: str, nbytes: int, into: memoryview) -> None:
        """Copy the first bytes of the object into the memory. Raises `NixlFailed`."""
        self._collect()
        if len(self._given_up) + len(self._lost) >= _MOST_GIVEN_UP:
            raise NixlFailed(
                f"{len(self._given_up)} reads that were given up have not ended, "
                f"{len(self._lost)} that failed to begin may not have"
            )
        read = self._begin(name, nbytes)
        wait = _FIRST_POLL
        try:
            while not self._ended(read):
                await asyncio.sleep(wait)
                wait = min(2 * wait, _LONGEST_POLL)
        except asyncio.CancelledError:
            self._given_up.append(read)
            raise
        except NixlFailed:
            self._end(read)
            raise
        into[:nbytes] = read.buffer.memory[:nbytes]
        self._end(read)

    def _begin(self, name: str, nbytes: int) -> _Read:
        buffer = self._buffer(nbytes)
        at = (0, nbytes, next(self._ids))
        registered = handle = None
        try:
            registered = self._agent.register_memory([(*at, name)], "OBJ", backends=["OBJ"])
            ours = self._agent.get_xfer_descs([(buffer.address, nbytes, 0)], "DRAM")
            theirs = self._agent.get_xfer_descs([at], "OBJ")
            handle = self._agent.initialize_xfer("READ", ours, theirs, self._name, backends=["OBJ"])
            self._agent.transfer(handle)
        except Exception as e:
            # If it was begun, who knows what it still does with the buffer.
            if handle is None:
                self._put_back(buffer)
            else:
                self._lost.append(buffer)
            if registered is not None:
                self._agent.deregister_memory(registered)
            raise NixlFailed(f"{type(e).__name__}: {e}") from e
        return _Read(handle, registered, buffer)

    def _ended(self, read: _Read) -> bool:
        """Raises `NixlFailed` if it ended badly."""
        try:
            state = self._agent.check_xfer_state(read.handle)
        except Exception as e:
            raise NixlFailed(f"{type(e).__name__}: {e}") from e
        if state not in ("PROC", "DONE"):
            raise NixlFailed(f"a read is {state}")
        return bool(state == "DONE")

    def _end(self, read: _Read) -> None:
        self._agent.release_xfer_handle(read.handle)
        self._agent.deregister_memory(read.registered)
        self._put_back(read.buffer)

    def _collect(self) -> None:
        """Take back what reads that were given up have left."""
        running = []
        for read in self._given_up:
            try:
                ended = self._ended(read)
            except NixlFailed:
                ended = True
            if ended:
                self._end(read)
            else:
                running.append(read)
        self._given_up = running

    def _buffer(self, nbytes: int) -> _Buffer:
        """Of at least that size, registered."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._free.get(size):
            return self._free[size].pop()
        memory = memoryview(mmap.mmap(-1, max(size, mmap.PAGESIZE)))
        address = int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
        self._agent.register_memory([(address, memory.nbytes, 0, "")], "DRAM", backends=["OBJ"])
        return _Buffer(memory, address)

    def _put_back(self, buffer: _Buffer) -> None:
        self._free.setdefault(buffer.memory.nbytes, []).append(buffer)


def _parameters(options: ObjOptions, credentials: Sequence[str]) -> dict[str, str]:
    found = {
        "bucket": options.bucket,
        "region": options.region or "us-east-1",
        "use_virtual_addressing": str(options.bucket_in_host).lower(),
    }
    if options.endpoint is not None:
        found |= {
            "endpoint_override": options.endpoint,
            "scheme": urlsplit(options.endpoint).scheme,
        }
    if options.ca is not None:
        found["ca_bundle"] = str(options.ca)
    names = ("access_key", "secret_key", "session_token")
    return found | {name: value for name, value in zip(names, credentials, strict=False) if value}
