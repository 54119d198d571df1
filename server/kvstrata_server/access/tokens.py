"""API tokens: made by `kvstrata token`, kept as hashes, known to every replica.

A token is `kvs_<id>_<secret>`. The secret has 256 random bits, so that one SHA-256 of it is as good
as a slow hash; the database holds that, and nothing that could be used to ask.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from secrets import compare_digest
from typing import Any

from sqlalchemy import insert, select, update
from sqlalchemy.exc import DBAPIError

from kvstrata.errors import Busy, ConfigError, Missing
from kvstrata_server.access.roles import ANYONE, ROOT, Identity, Role
from kvstrata_server.clock import Clock
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.models import TokenRow

__all__ = ["REFRESH", "TokenInfo", "Tokens", "create", "listed", "revoke"]

REFRESH = 2.0
"""Seconds until a token that was made or revoked is one for a server that runs."""
_NOBODY = b"\0" * 32
_TAKEN = (ROOT.name, ANYONE.name)


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """What may be shown of a token. Times are seconds since the epoch."""

    id: str
    name: str
    role: Role
    tenants: frozenset[str] | None
    node: str | None
    created: float
    expires: float | None
    revoked: float | None

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.role, self.tenants, self.node)


class Tokens:
    """Those that SQL knows, in memory, and the one of the settings. `run` keeps them fresh."""

    def __init__(self, database: Database, clock: Clock, of_settings: str) -> None:
        self._database = database
        self._clock = clock
        self._root = _digest(of_settings) if of_settings else None
        self._known: dict[str, tuple[bytes, TokenInfo]] = {}

    @property
    def required(self) -> bool:
        """Whether one is needed at all: since the first one was made, revoked or not."""
        return self._root is not None or bool(self._known)

    async def refresh(self) -> None:
        """Raises `Busy` or `sqlalchemy.exc.DBAPIError` if the database can't be read."""
        rows = await self._database.rows(select(TokenRow.__table__))
        self._known = {row.id: (row.digest, _info(row)) for row in rows}

    async def run(self) -> None:
        """Read them again, for ever. While SQL is away those known stay good."""
        while True:
            await asyncio.sleep(REFRESH)
            try:
                await self.refresh()
            except (Busy, DBAPIError):
                continue  # the writer says in health what is wrong with it

    def identify(self, given: str) -> Identity | None:
        """Who bears this token; None: nobody does, or not any more. `ANYONE` where none is
        needed."""
        if not self.required:
            return ANYONE
        offered = _digest(given)
        # Both are compared, whatever the first says, so that time tells nothing.
        is_root = compare_digest(offered, self._root or _NOBODY)
        digest, info = self._known.get(_id_of(given), (_NOBODY, None))
        matches = compare_digest(offered, digest)
        if is_root and self._root is not None:
            return ROOT
        if not matches or info is None or info.revoked is not None:
            return None
        if info.expires is not None and info.expires <= self._clock():
            return None
        return info.identity


async def create(
    database: Database,
    name: str,
    role: Role,
    now: float,
    tenants: Collection[str] | None = None,
    node: str | None = None,
    expires: float | None = None,
) -> str:
    """Make a token and return it; it can't be shown again. Raises `ConfigError` on a scope that
    the role has no use for, or a name that is taken."""
    if tenants is not None and role in (Role.NODE, Role.ADMIN):
        raise ConfigError(f"a token with the role {role} is not limited to tenants: leave them out")
    if node is not None and role is not Role.NODE:
        raise ConfigError(f"only tokens with the role node are for one node, not {role}")
    if name in _TAKEN:
        raise ConfigError(f"the audit log calls others {name!r}: choose another name")
    taken = [info for info in await listed(database) if info.name == name and info.revoked is None]
    if taken:
        raise ConfigError(f"there is a token {name!r} already: revoke it, or choose another name")
    ident = secrets.token_hex(6)
    token = f"kvs_{ident}_{secrets.token_urlsafe(32)}"
    row = {
        "id": ident,
        "name": name,
        "role": role.value,
        "tenants": None if tenants is None else sorted(tenants),
        "node": node,
        "digest": _digest(token),
        "created": now,
        "expires": expires,
        "revoked": None,
    }
    async with database.engine.begin() as connection:
        await connection.execute(insert(TokenRow).values(row))
    return token


async def listed(database: Database) -> Sequence[TokenInfo]:
    """All that were ever made, oldest first."""
    rows = await database.rows(select(TokenRow.__table__).order_by(TokenRow.created, TokenRow.id))
    return [_info(row) for row in rows]


async def revoke(database: Database, name: str, now: float) -> TokenInfo:
    """End the token of this name. Raises `Missing` if there is none in use."""
    found = [info for info in await listed(database) if info.name == name and info.revoked is None]
    if not found:
        raise Missing(f"no token {name!r} is in use: `kvstrata token list` shows those there are")
    async with database.engine.begin() as connection:
        await connection.execute(
            update(TokenRow).where(TokenRow.id == found[0].id).values(revoked=now)
        )
    return found[0]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _id_of(token: str) -> str:
    parts = token.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == "kvs" else ""


def _info(row: Any) -> TokenInfo:
    return TokenInfo(
        id=row.id,
        name=row.name,
        role=Role(row.role),
        tenants=None if row.tenants is None else frozenset(row.tenants),
        node=row.node,
        created=row.created,
        expires=row.expires,
        revoked=row.revoked,
    )
