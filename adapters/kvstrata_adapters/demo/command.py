"""The command line of the demo."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvstrata.cli.flags import Parser
from kvstrata.errors import KVStrataError
from kvstrata_adapters.demo.conversations import Workload
from kvstrata_adapters.demo.report import print_logs, print_story
from kvstrata_adapters.demo.story import tell
from kvstrata_adapters.engines.numpy_decoder import DecoderConfig

__all__ = ["run"]

_PIPE_WIDTH = 140


def run(argv: list[str]) -> int:
    parser = Parser(
        "kvstrata demo",
        "An engine offloads, is killed, reloads; a second node fetches from the first.\n"
        "Everything runs on loopback and ends with the command.",
    )
    defaults = Workload()
    for name, about in (
        ("conversations", "how many, round robin"),
        ("turns", "of each on node A, before the restart"),
        ("message", "tokens a user says each turn"),
        ("answer", "tokens generated each turn"),
        ("seed", "of what is said"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(
            f"--{name}", type=_count, default=default, metavar="N", help=f"{about} ({default})"
        )
    options = parser.parse_args(argv)
    workload = Workload(**vars(options))
    config = DecoderConfig(max_tokens=-(-workload.longest // 64) * 64)

    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="kvstrata-demo-") as folder:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("starting", total=workload.steps)

            def step(what: str, turn: bool) -> None:
                progress.update(task, description=what, advance=1 if turn else 0)

            try:
                story = tell(Path(folder), workload, config, step)
            except KVStrataError:
                progress.stop()
                print_logs(console, Path(folder))
                raise
        if story.failed:
            print_logs(console, Path(folder))
    print_story(console, story)
    if story.failed:
        console.print(f"[bold red]{len(story.failed)} of {len(story.checks)} checks failed[/]")
        return 1
    console.print(f"[bold green]all {len(story.checks)} checks hold[/]")
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """SIGTERM ends us like Ctrl-C: every process we started ends first."""
    raise KeyboardInterrupt
