"""`kvstrata fsck`: verify a store, report what is wrong with it, repair it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvstrata.check.fs import FsCheck, FsCheckOptions
from kvstrata.check.report import HARMLESS, Problem, Report
from kvstrata.cli.cluster import show, size, table
from kvstrata.cli.flags import Parser
from kvstrata.cli.stores import add_store, object_options, progress_bar

__all__ = ["FOUND", "REPAIRED", "main"]

FOUND = 3
REPAIRED = 4

_SHOWN = 100
_ABOUT = """\
Verify the chunks of a store, beside the nodes that use it. Nothing is changed without --repair,
which does what a node would do: damaged and strange files go to quarantine, what dead writers
left is removed, and a chunk under another's name goes under its own.

exit status: 0 nothing is wrong, 3 something is (and was not repaired), 4 all of it was repaired,
1 it could not be checked, 2 the command line can't work. Orphans, quarantined files and
namespaces without a description are told and change no status."""


def main(argv: list[str]) -> int:
    parser = Parser("kvstrata fsck", _ABOUT)
    add_store(parser)
    parser.add_argument("--repair", action="store_true", help="put right what can be")
    parser.add_argument(
        "--quick", action="store_true", help="headers and names only: payloads are not read"
    )
    options = parser.parse_args(argv)
    bucket = object_options(options)
    with progress_bar("checking") as progress:
        asked = FsCheckOptions(options.repair, not options.quick, options.threads)
        if bucket is None:
            report = FsCheck(Path(options.store), asked, progress).run()
        else:
            from kvstrata.check.obj import check_objects

            report = check_objects(bucket, asked, progress)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(_document(report))).decode())
    else:
        _show(report, payloads=not options.quick)
    if report.left:
        return FOUND
    return REPAIRED if report.wrong else 0


def _document(report: Report) -> dict[str, object]:
    return {
        "store": report.store,
        "id": report.id,
        "chunks": report.chunks,
        "stored_bytes": report.stored_bytes,
        "verified_bytes": report.verified_bytes,
        "namespaces": report.namespaces,
        "gone": report.gone,
        "seconds": round(report.seconds, 3),
        "wrong": report.wrong,
        "left": report.left,
        "found": {problem.value: n for problem, n in sorted(report.found.items())},
        "repaired": {problem.value: n for problem, n in sorted(report.repaired.items()) if n},
        "findings": report.findings,
    }


def _show(report: Report, payloads: bool) -> None:
    state = "clean" if not report.wrong else "repaired" if not report.left else "DAMAGED"
    found = table(
        f"store {report.id or '?'} at {report.store}: {state}", "what", ">found", ">repaired"
    )
    for problem in Problem:
        if report.found[problem]:
            name = f"{problem.value} (harmless)" if problem in HARMLESS else problem.value
            found.add_row(name, str(report.found[problem]), str(report.repaired[problem]))
    read = f", {size(report.verified_bytes)} verified" if payloads else ", payloads not read"
    gone = f", {report.gone} removed meanwhile" if report.gone else ""
    found.caption = (
        f"{report.chunks} chunks of {report.namespaces} namespaces, "
        f"{size(report.stored_bytes)}{read}{gone}, in {report.seconds:.1f} s"
    )
    tables = [found]
    serious = [f for f in report.findings if f.problem not in HARMLESS]
    if serious:
        rows = table("", "problem", "where", "detail", "done")
        for finding in serious[:_SHOWN]:
            rows.add_row(
                finding.problem.value, finding.path, finding.detail, finding.repaired or "-"
            )
        if len(serious) > _SHOWN:
            rows.caption = f"and {report.wrong - _SHOWN} more: --json tells up to 10,000"
        tables.append(rows)
    show(*tables)
