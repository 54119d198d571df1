"""`host:port` as people write it, and who can reach it."""

from __future__ import annotations

import ipaddress

from kvstrata.errors import ConfigError

__all__ = ["is_loopback", "split_address"]


def split_address(text: str) -> tuple[str, int]:
    """`host:port`, `[::1]:port` or `:port` as host and port. Raises `ConfigError`."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigError(
            f"{text[:200]!r} is not an address: write host:port, as in 127.0.0.1:7800"
        )
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
