"""The demo's last words: a table of what was measured, and every check."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvstrata_adapters.demo.conversations import Turn
from kvstrata_adapters.demo.story import Story

__all__ = ["print_logs", "print_story"]

_MIB = 1 << 20
_LOG_LINES = 30
_TIERS = ("host", "fs", "peer")


def print_story(console: Console, story: Story) -> None:
    console.print(_table(story))
    transfer = story.transfer
    if transfer is not None:
        console.print(
            f"transfer {transfer.id}: {transfer.bytes / _MIB:.1f} MiB to {transfer.target} "
            f"in {1000 * story.transfer_seconds:.0f} ms, {transfer.state}"
        )
    stored = sum(turn.ours.stored_bytes for turn in story.turns)
    seconds = sum(turn.ours.seconds.store for turn in story.turns)
    console.print(
        f"stored {stored / _MIB:.1f} MiB from the engines in {1000 * seconds:.0f} ms, after the "
        f"answers; {story.evicted} chunks were evicted from node A's "
        f"{story.host_bytes / _MIB:.0f} MiB, its conversations have "
        f"{story.working_set / _MIB:.0f} MiB"
    )
    for check in story.checks:
        mark = "[green]ok[/]    " if check.holds else "[bold red]FAILED[/]"
        console.print(f"{mark} {check.what}", f"[dim]({check.detail.strip()})[/]", highlight=False)


def print_logs(console: Console, folder: Path) -> None:
    """The end of what each process said, for a demo that went wrong."""
    for log in sorted(folder.glob("*.log")):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        console.print(f"[bold]{log.stem}[/] said last:")
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _table(story: Story) -> Table:
    table = Table(
        title=f"hits are chunks of {story.chunk_tokens} tokens, {story.chunk_bytes // 1024} KiB; "
        "times are to the first token",
        title_justify="left",
        show_footer=True,
    )
    everything = story.turns
    hits = {tier: sum(p.hits.get(tier, 0) for p in story.phases) for tier in _TIERS}
    total = ["total", *_cells(everything, hits)]
    names = ["", "turns", "tokens asked", "reused", "hits: host", "fs", "peer"]
    names += ["loaded", "recomputed", "with kvstrata", "saved"]
    for name, footer in zip(names, total, strict=True):
        table.add_column(name, footer, justify="right" if name else "left", no_wrap=not name)
    for phase in story.phases:
        table.add_row(phase.name, *_cells(phase.turns, phase.hits))
    return table


def _cells(turns: Iterable[Turn], hits: dict[str, int]) -> list[str]:
    turns = list(turns)
    asked = sum(turn.ours.prompt_tokens for turn in turns)
    reused = sum(turn.ours.cached_tokens for turn in turns)
    plain = sum(turn.plain.seconds.first_token for turn in turns)
    ours = sum(turn.ours.seconds.first_token for turn in turns)
    saved = sum(turn.saved for turn in turns)
    return [
        str(len(turns)),
        str(asked),
        f"{reused} ({reused / asked:.0%})" if asked else "0",
        *(str(hits.get(tier, 0)) for tier in _TIERS),
        f"{sum(turn.ours.loaded_bytes for turn in turns) / _MIB:.1f} MiB",
        f"{plain:.2f} s",
        f"{ours:.2f} s",
        f"{saved:.2f} s ({saved / plain:.0%})" if plain else "0 s",
    ]
