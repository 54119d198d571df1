"""The demo's last words: a table of what was measured, and every check."""

from __future__ import annotations

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
            f"transfer: {transfer.bytes / _MIB:.1f} MiB from {transfer.source} to "
            f"{transfer.target} in {1000 * story.transfer_seconds:.0f} ms, {transfer.state}"
        )
    stored = sum(turn.ours.stored_bytes for turn in story.turns)
    seconds = sum(turn.ours.seconds.store for turn in story.turns)
    console.print(
        f"stored: {stored / _MIB:.1f} MiB in {1000 * seconds:.0f} ms, after the answers; "
        f"a chunk is {story.chunk_tokens} tokens, {story.chunk_bytes // 1024} KiB"
    )
    console.print(
        f"node A: {story.host_bytes / _MIB:.0f} MiB of memory for {story.working_set / _MIB:.0f} "
        f"MiB of KV, {story.evicted} chunks evicted"
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
    """A column a phase, and one for all: it fits a terminal of 80 columns."""
    table = Table(title="hits are chunks; times are to the first token", title_justify="left")
    table.add_column("", no_wrap=True)
    for name in (*(phase.name for phase in story.phases), "total"):
        table.add_column(name, justify="right", no_wrap=True)
    hits = {tier: sum(p.hits.get(tier, 0) for p in story.phases) for tier in _TIERS}
    columns = [_column(phase.turns, phase.hits) for phase in story.phases]
    columns.append(_column(story.turns, hits))
    for i, (name, _) in enumerate(columns[0]):
        ends_section = name in ("- of those asked", "loaded")
        table.add_row(name, *(column[i][1] for column in columns), end_section=ends_section)
    return table


def _column(turns: list[Turn], hits: dict[str, int]) -> list[tuple[str, str]]:
    asked = sum(turn.ours.prompt_tokens for turn in turns)
    reused = sum(turn.ours.cached_tokens for turn in turns)
    plain = sum(turn.plain.seconds.first_token for turn in turns)
    ours = sum(turn.ours.seconds.first_token for turn in turns)
    loaded = sum(turn.ours.loaded_bytes for turn in turns)
    return [
        ("turns", str(len(turns))),
        ("tokens asked", str(asked)),
        ("tokens reused", str(reused)),
        ("- of those asked", f"{reused / asked:.0%}"),
        ("hits: host memory", str(hits.get("host", 0))),
        ("hits: file system", str(hits.get("fs", 0))),
        ("hits: from the peer", str(hits.get("peer", 0))),
        ("loaded", f"{loaded / _MIB:.1f} MiB"),
        ("recomputing", f"{plain:.2f} s"),
        ("with kvstrata", f"{ours:.2f} s"),
        ("time saved", f"{plain - ours:.2f} s"),
        ("- of recomputing", f"{(plain - ours) / plain:.0%}" if plain else ""),
    ]
