"""How bytes get from one node's region into another's; see `base` for the contract."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstrata.errors import ConfigError
from kvstrata.plugins import load_class
from kvstrata.transports.base import Authorize, Read, Transport

__all__ = ["Authorize", "Read", "Transport", "open_transport", "start_transports"]

log = logging.getLogger(__name__)

# Imported when asked for: nixl is optional, and large.
_BUILT_IN = {
    "nixl": "kvstrata.transports.nixl:NixlTransport",
    "tcp": "kvstrata.transports.tcp:TcpTransport",
}


def open_transport(
    name: str, memory: memoryview, authorize: Authorize, listen_host: str = ""
) -> Transport:
    """A transport by its name or an own one by `module:Class`, not started.

    `memory` is the region (a writable byte view); with an empty `listen_host` it only pulls.
    Raises `ConfigError`.
    """
    return _find(name)(memory, authorize, listen_host)


def _find(name: str) -> type[Transport]:
    return load_class("peers.transports", name, Transport, _BUILT_IN)


async def start_transports(
    names: Sequence[str],
    memory: memoryview,
    authorize: Authorize,
    listen_host: str = "",
    *,
    opened: Callable[[Transport], object],
) -> list[Transport]:
    """Those of `names` that run on this host, started, in that order.

    One that can't is skipped with a log line. Raises `ConfigError` if none is left, and on a name
    that is none on any host. `opened` is told of each before it starts: all of those the caller
    closes, whatever comes of the start, and before `memory` goes.
    """
    if not names:
        raise ConfigError(f"peers.transports is empty: name some of {sorted(_BUILT_IN)}")
    for name in names:
        _find(name)
    started: list[Transport] = []
    reasons: list[str] = []
    for name in names:
        try:
            transport = open_transport(name, memory, authorize, listen_host)
            opened(transport)
            await transport.start()
        except ConfigError as e:
            log.info("transport %s is left out: %s", name, e)
            reasons.append(str(e))
        else:
            started.append(transport)
    if not started:
        raise ConfigError(f"none of peers.transports {list(names)} runs here: {'; '.join(reasons)}")
    return started
