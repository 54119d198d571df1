"""What a check of a store found."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field, replace

__all__ = ["HARMLESS", "Finding", "Problem", "Report"]

_MOST_FINDINGS = 10_000


class Problem(enum.StrEnum):
    """What can be wrong with a store or with one thing in it."""

    IDENTITY = "identity"  # the file that says which store this is does not
    HEADER = "header"  # damaged, of no known version, or of another length than the file
    PAYLOAD = "payload"  # its checksum differs
    NAME = "name"  # it stands under another chunk's name
    FOREIGN = "foreign"  # nothing that a node puts there
    UNREADABLE = "unreadable"  # the medium gives an error
    DESCRIPTION = "description"  # a namespace.json that is not what its folder is called
    UNDESCRIBED = "undescribed"  # no namespace.json: a node's first store writes it
    ORPHAN = "orphan"  # left by a writer that died
    QUARANTINED = "quarantined"  # set aside by a node or by a check


HARMLESS = frozenset({Problem.UNDESCRIBED, Problem.ORPHAN, Problem.QUARANTINED})
"""What costs room or comfort, and harms no chunk: it makes no check fail."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`path` is relative to the root or prefix; `repaired` says what was done, empty: nothing."""

    problem: Problem
    path: str
    detail: str
    repaired: str = ""


@dataclass
class Report:
    """A check of one store. Sizes in bytes; `stored_bytes` is what its chunks take of the medium.

    `findings` are at most 10,000; `found` and `repaired` count all.
    """

    store: str
    id: str = ""
    chunks: int = 0
    stored_bytes: int = 0
    verified_bytes: int = 0
    namespaces: int = 0
    gone: int = 0  # removed by others while the check ran
    seconds: float = 0.0
    found: Counter[Problem] = field(default_factory=Counter)
    repaired: Counter[Problem] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.found[finding.problem] += 1
        self.repaired[finding.problem] += bool(finding.repaired)
        if len(self.findings) < _MOST_FINDINGS:
            path, detail = _text(finding.path), _text(finding.detail)
            self.findings.append(replace(finding, path=path, detail=detail))

    def merge(self, other: Report) -> None:
        """Take in what another part of the same check found."""
        self.chunks += other.chunks
        self.stored_bytes += other.stored_bytes
        self.verified_bytes += other.verified_bytes
        self.gone += other.gone
        self.found += other.found
        self.repaired += other.repaired
        self.findings += other.findings[: max(0, _MOST_FINDINGS - len(self.findings))]

    @property
    def wrong(self) -> int:
        """Problems that are not harmless."""
        return sum(n for problem, n in self.found.items() if problem not in HARMLESS)

    @property
    def left(self) -> int:
        """Those of them that were not repaired."""
        mended = sum(n for problem, n in self.repaired.items() if problem not in HARMLESS)
        return self.wrong - mended


def _text(name: str) -> str:
    """To be shown: a file may be called anything, what is no text and what steers terminals too."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else ascii(c)[1:-1].replace("\\udc", "\\x") for c in name)
