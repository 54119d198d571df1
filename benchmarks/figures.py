"""What the benchmarks here have in common: a figure beside its peer and its limit, and two ways
to print it, a table for people and one JSON object a line for machines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

__all__ = ["Figure", "parser", "show"]


@dataclass(frozen=True)
class Figure:
    """Ours, the peer's (None: it isn't installed here) and the limit, all in `unit`.

    `settings` is all that else decides the three: sizes, threads, rounds, who the peer is.
    """

    name: str
    value: float
    peer: float | None
    limit: float
    unit: str = "GB/s"
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """To the limit."""
        return self.value / self.limit

    def line(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "value": round(self.value, 3),
                "unit": self.unit,
                "peer": None if self.peer is None else round(self.peer, 3),
                "limit": round(self.limit, 3),
                "ratio": round(self.ratio, 3),
                "settings": dict(self.settings),
            }
        )


def parser(document: str | None) -> argparse.ArgumentParser:
    """Of a benchmark whose docstring begins with its question."""
    built = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    built.add_argument("--json", action="store_true", help="one JSON object a line")
    return built


def show(title: str, figures: Sequence[Figure], as_json: bool) -> None:
    if as_json:
        for figure in figures:
            print(figure.line())
        return
    table = Table("", "ours", "peer", "limit", "", "of the limit", "rounds", title=title)
    for f in figures:
        table.add_row(
            f.name,
            *("-" if x is None else f"{x:.2f}" for x in (f.value, f.peer, f.limit)),
            f.unit,
            f"{f.ratio:.0%}",
            str(f.settings.get("rounds", "")),
        )
    Console().print(table)
