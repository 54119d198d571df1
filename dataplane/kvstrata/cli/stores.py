"""What `fsck` and `du` share: how a store is named, and their progress on a terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvstrata.cli.flags import Parser
from kvstrata.errors import ConfigError

__all__ = ["add_store", "object_options", "progress_bar"]

_S3 = "s3://"


def add_store(parser: Parser) -> None:
    parser.add_argument(
        "store",
        metavar="STORE",
        help="root of an fs tier, or s3://bucket/prefix of an obj tier",
    )
    parser.add_argument("--threads", type=_threads, default=4, help="workers (default: 4)")
    parser.add_argument("--json", action="store_true", help="for machines")
    group = parser.add_argument_group("object stores")
    group.add_argument("--endpoint", help="URL of the store, if it is not AWS")
    group.add_argument("--region")
    group.add_argument("--profile", help="section of the shared AWS files")
    group.add_argument("--ca", type=Path, help="PEM bundle of the authorities to trust")


def _threads(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 64):
        raise argparse.ArgumentTypeError("a number from 1 to 64")
    return int(text)


def object_options(options: argparse.Namespace) -> dict[str, object] | None:
    """Options of an obj tier for `s3://bucket/prefix`; None: the store is a directory."""
    flags = ("endpoint", "region", "profile", "ca")
    given = {name: getattr(options, name) for name in flags if getattr(options, name) is not None}
    if not options.store.startswith(_S3):
        if given:
            raise ConfigError(f"--{next(iter(given))} is for s3:// stores, not for a directory")
        return None
    bucket, _, prefix = options.store.removeprefix(_S3).partition("/")
    if not bucket:
        raise ConfigError(f"{options.store!r} names no bucket: write s3://bucket/prefix")
    return {"bucket": bucket, "prefix": prefix, **given}


@contextlib.contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """On standard error, where that is a terminal. What it gives may be called from any thread."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)
