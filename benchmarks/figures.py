"""What the benchmarks here have in common: a figure beside its peer and its limit, and two ways
to print it, a table for people and one JSON object a line for machines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Column, Table

__all__ = ["Figure", "parser", "show"]


@dataclass(frozen=True)
class Figure:
    """Ours, the peer's (None: it isn't installed here) and the limit (None: there is none), all in
    `unit`.

    `settings` is all that else decides the three: sizes, threads, rounds, who the peer is.
    """

    name: str
    value: float
    peer: float | None
    limit: float | None
    unit: str = "GB/s"
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """To the limit."""
        return None if self.limit is None else self.value / self.limit

    @property
    def of_peer(self) -> float | None:
        """To the peer."""
        return None if self.peer is None else self.value / self.peer

    def line(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "value": round(self.value, 3),
                "unit": self.unit,
                "peer": _rounded(self.peer),
                "limit": _rounded(self.limit),
                "ratio": _rounded(self.ratio),
                "of_peer": _rounded(self.of_peer),
                "settings": dict(self.settings),
            }
        )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


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
    columns = ("ours", "peer", "limit", "", "of limit", "of peer", "rounds")
    # Names are told in full, however narrow the terminal is.
    table = Table(Column(no_wrap=True), *columns, title=title)
    for f in figures:
        table.add_row(
            f.name,
            *("-" if x is None else f"{x:.2f}" for x in (f.value, f.peer, f.limit)),
            f.unit,
            *("-" if x is None else f"{x:.0%}" for x in (f.ratio, f.of_peer)),
            str(f.settings.get("rounds", "")),
        )
    Console().print(table)
