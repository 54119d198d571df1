"""Which NUMA node memory comes from: the kernel's `mbind`, without libnuma.

A policy on shared memory belongs to the memory, so one process sets it for all that map it. It
decides where pages are put when they are first touched, and moves none that are there already.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable
from pathlib import Path

from kvstrata.errors import ConfigError

__all__ = ["memory_nodes", "prefer_node"]

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1  # MPOL_PREFERRED: other nodes' memory where this one's is used up
_MASK_BITS = 1024
_NODES = Path("/sys/devices/system/node/has_memory")
_WHY = {
    errno.EPERM: "not allowed here: give the container SYS_NICE, or a seccomp profile with mbind",
    errno.ENOSYS: "this kernel is built without NUMA",
}

Bind = Callable[[int, int, int], int]
"""(address, bytes, node) -> 0, or why not as an errno."""


def memory_nodes(path: Path = _NODES) -> list[int]:
    """The NUMA nodes of this host that have memory; none if the kernel doesn't say."""
    try:
        told = path.read_text().strip()
    except OSError:
        return []
    nodes: list[int] = []
    for part in told.split(",") if told else []:
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes


def prefer_node(
    address: int, nbytes: int, node: int, nodes: list[int] | None = None, bind: Bind | None = None
) -> str | None:
    """Have pages of this mapping, not touched yet, come from `node`; why not, if the kernel won't.

    Raises `ConfigError` if this host has no such node. `nodes` and `bind` are the kernel's answers.
    """
    known = memory_nodes() if nodes is None else nodes
    if known and node not in known:
        raise ConfigError(f"host.numa_node is {node}: nodes of this host with memory are {known}")
    error = (bind or _mbind)(address, nbytes, node)
    if not error:
        return None
    return _WHY.get(error) or os.strerror(error)


def _mbind(address: int, nbytes: int, node: int) -> int:
    number = _MBIND.get(platform.machine())
    if number is None:
        return errno.ENOSYS
    if not 0 <= node < _MASK_BITS - 1:
        return errno.EINVAL
    word = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // word))()
    mask[node // word] = 1 << node % word
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS),
        ctypes.c_ulong(0),
    )
    return ctypes.get_errno() if done else 0
