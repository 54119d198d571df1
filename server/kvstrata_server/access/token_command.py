"""`kvstrata token`: make, list and revoke the API's tokens, in the server's database itself."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

from rich.table import Table
from sqlalchemy.exc import DBAPIError

from kvstrata.cli.cluster import seconds, show, table
from kvstrata.cli.flags import Parser
from kvstrata.config import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata_server.access.audit import PutAudit
from kvstrata_server.access.roles import Role
from kvstrata_server.access.tokens import REFRESH, TokenInfo, create, listed, revoke
from kvstrata_server.sql.database import Database
from kvstrata_server.sql.opening import advice

__all__ = ["main"]

_ABOUT = f"""\
Tokens for the control plane's API. The database is the server's: KVSTRATA_SERVER_DATABASE, the
settings file, or --database. Servers that run know a new or revoked token within {REFRESH:g} s.
"""
_DATABASE = "SQLAlchemy URL [env: KVSTRATA_SERVER_DATABASE]"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a new token on standard output, alone, and all else on standard error."""
    options = _parse(list(sys.argv[1:] if argv is None else argv))
    address = options.database or ServerSettings().database
    return asyncio.run(_run(options, address))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser("kvstrata token", _ABOUT)
    parser.add_argument("--database", metavar="URL", help=_DATABASE)
    acts = parser.add_subparsers(dest="act", required=True, metavar="ACT", parser_class=Parser)

    def act(name: str, about: str) -> Parser:
        added: Parser = acts.add_parser(
            name, help=about, description=f"{about[0].upper()}{about[1:]}."
        )
        # Without a default of its own, which would hide what was said before the act.
        added.add_argument("--database", metavar="URL", default=argparse.SUPPRESS, help=_DATABASE)
        return added

    made = act("create", "make a token and print it, once")
    made.add_argument("name", help="whose it is; shown in the audit log")
    made.add_argument("--role", required=True, choices=[role.value for role in Role])
    made.add_argument(
        "--tenant",
        action="append",
        metavar="TENANT",
        help="only for this tenant's chunks; may be repeated",
    )
    made.add_argument("--node", help="only in the name of this node (role node)")
    made.add_argument("--expires", type=seconds, metavar="TIME", help="as in 720h; default: never")
    act("list", "the tokens there are, without the tokens themselves")
    ended = act("revoke", "end a token")
    ended.add_argument("name")
    return parser.parse_args(argv)


async def _run(options: argparse.Namespace, address: str) -> int:
    database = Database(address)
    try:
        await _prepare(database)
        if options.act == "list":
            show(_table(await listed(database)))
            return 0
        now = time.time()
        if options.act == "create":
            expires = None if options.expires is None else now + options.expires
            token = await create(
                database,
                options.name,
                Role(options.role),
                now,
                options.tenant,
                options.node,
                expires,
            )
            print(token)
            print(f"made in {database.shown}", file=sys.stderr)
        else:
            await revoke(database, options.name, now)
            print(f"revoked: servers refuse it within {REFRESH:g} s", file=sys.stderr)
        await _audit(database, f"{options.act}_token", options.name, now)
    except DBAPIError as e:
        raise ConfigError(
            f"database {database.shown} can't be written: {e.orig}. {advice(e)}"
        ) from e
    finally:
        await database.close()
    return 0


async def _prepare(database: Database) -> None:
    """Make the tables where no server has yet; one that runs has them, and keeps others off."""
    try:
        await database.migrate()
    except ConfigError as e:
        await database.require_ours()
        try:
            await listed(database)
        except Exception:
            raise e from None


async def _audit(database: Database, act: str, name: str, now: float) -> None:
    async with database.engine.begin() as connection:
        await PutAudit(now, _user(), "command line", act, name, 200).apply(connection)


def _user() -> str:
    try:
        return f"user {getpass.getuser()}"
    except (KeyError, OSError):  # a container's user without a name
        return "user unknown"


def _table(tokens: Sequence[TokenInfo]) -> Table:
    shown = table("Tokens", "name", "role", "tenants", "node", "made", "expires", "state")
    now = time.time()
    for token in tokens:
        state = "in use"
        if token.revoked is not None:
            state = f"revoked {_day(token.revoked)}"
        elif token.expires is not None and token.expires <= now:
            state = "expired"
        shown.add_row(
            token.name,
            token.role,
            "all" if token.tenants is None else ", ".join(sorted(token.tenants)),
            token.node or "",
            _day(token.created),
            "" if token.expires is None else _day(token.expires),
            state,
        )
    return shown


def _day(when: float) -> str:
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M")


if __name__ == "__main__":
    sys.exit(main())
