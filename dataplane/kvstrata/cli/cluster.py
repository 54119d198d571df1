"""What the commands that ask the control plane share: where it is, and the keys they name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from kvstrata.api import from_hex
from kvstrata.cli.flags import Parser
from kvstrata.config import parse_seconds, what_is_wrong
from kvstrata.control import SyncControlPlane
from kvstrata.errors import ConfigError, Malformed

__all__ = [
    "DEFAULT_URL",
    "add_server",
    "checked",
    "connect",
    "read_keys",
    "seconds",
    "show",
    "size",
    "table",
]

DEFAULT_URL = "http://127.0.0.1:7800"


def add_server(parser: Parser, default_url: str | None = DEFAULT_URL) -> None:
    parser.add_argument(
        "--url",
        default=os.environ.get("KVSTRATA_URL") or default_url,
        help=f"the control plane, as in {DEFAULT_URL} [env: KVSTRATA_URL]",
    )
    parser.add_argument(
        "--token",
        default=os.environ.get("KVSTRATA_TOKEN", ""),
        help="bearer token; better set in the environment [env: KVSTRATA_TOKEN]",
    )
    parser.add_argument(
        "--ca",
        type=Path,
        default=os.environ.get("KVSTRATA_CA") or None,
        help="certificates to trust instead of the system's, PEM [env: KVSTRATA_CA]",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def connect(options: argparse.Namespace) -> SyncControlPlane:
    return SyncControlPlane(options.url, options.token, ca=options.ca)


def read_keys(words: Sequence[str]) -> list[str]:
    """Keys in hexadecimal; `-` stands for those on standard input, apart by white space.

    Raises `ConfigError` on one that can't be a key.
    """
    keys: list[str] = []
    for word in words:
        keys += sys.stdin.read().split() if word == "-" else [word]
    if not keys:
        raise ConfigError("no keys: standard input was empty")
    for key in keys:
        try:
            from_hex(key)
        except Malformed as e:
            raise ConfigError(f"{key[:80]!r} is not a chunk key: {e}") from e
    return keys


@contextmanager
def checked() -> Iterator[None]:
    """Around the making of a request: raises `ConfigError` if its schema does not allow it."""
    try:
        yield
    except ValidationError as e:
        raise ConfigError(what_is_wrong(e)) from e


def seconds(text: str) -> float:
    """A time on the command line: `30s`, `200ms`, `5m`, or plain seconds."""
    try:
        return float(parse_seconds(text))
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def size(nbytes: int) -> str:
    """Bytes for people: `1.5 GiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def table(title: str, *columns: str) -> Table:
    """Columns that start with `>` are numbers. Show it with `show`."""
    built = Table(title=title)
    for column in columns:
        built.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",  # an address cut short is of no use
        )
    return built


def show(*tables: Table) -> None:
    """Print them, titles and captions on lines of their own: those may be wider than the table."""
    # Names and reasons come from others: brackets and colons in them are no markup.
    console = Console(markup=False, emoji=False, highlight=False)
    for each in tables:
        title, each.title, caption, each.caption = each.title, None, each.caption, None
        if title:
            console.print(title, soft_wrap=True)
        console.print(each)
        if caption:
            console.print(caption, soft_wrap=True)
