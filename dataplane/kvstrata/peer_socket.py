"""ZMQ sockets between nodes: bounded, with heartbeats, and sends that never wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import zmq

from kvstrata.peer_wire import HEARTBEAT_SECONDS, MAX_MESSAGE_BYTES

__all__ = ["post", "tune"]

_CONNECT_SECONDS = 5.0


def tune(socket: Any, host: str) -> None:
    """Set the bounds that hold on both sides, before bind or connect."""
    beat = int(HEARTBEAT_SECONDS * 1000)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.SNDHWM, 256),
        (zmq.RCVHWM, 64),
        (zmq.HEARTBEAT_IVL, beat),
        (zmq.HEARTBEAT_TIMEOUT, 2 * beat),
        (zmq.HEARTBEAT_TTL, 3 * beat),
        (zmq.HANDSHAKE_IVL, int(_CONNECT_SECONDS * 1000)),
        (zmq.CONNECT_TIMEOUT, int(_CONNECT_SECONDS * 1000)),
        # A connection that broke stays broken: the other side has forgotten the session.
        (zmq.RECONNECT_IVL, -1),
        (zmq.IPV6, int(":" in host)),
    ):
        socket.setsockopt(option, value)


def post(socket: Any, frames: Sequence[bytes]) -> None:
    """Send at once. Raises `zmq.ZMQError`: `Again` if the other side does not read."""
    # zmq.asyncio settles a DONTWAIT send before it returns.
    socket.send_multipart(frames, flags=zmq.DONTWAIT).result()
