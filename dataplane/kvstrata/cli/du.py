"""`kvstrata du`: what a store is used for, by namespace, tenant and age."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvstrata.check.fs_use import fs_use
from kvstrata.check.use import AGES, Use, UseReport
from kvstrata.cli.cluster import show, size, table
from kvstrata.cli.flags import Parser
from kvstrata.cli.stores import add_store, object_options, progress_bar

__all__ = ["main"]

_ABOUT = """\
Bytes of the medium that the chunks of a store use: by namespace (model, dtype, tenant), by tenant,
and by how long ago they were last used. Nothing is read but names, sizes and times."""


def main(argv: list[str]) -> int:
    parser = Parser("kvstrata du", _ABOUT)
    add_store(parser)
    options = parser.parse_args(argv)
    bucket = object_options(options)
    with progress_bar("counting") as progress:
        if bucket is None:
            report = fs_use(Path(options.store), options.threads, progress)
        else:
            from kvstrata.check.obj import use_of_objects

            report = use_of_objects(bucket, progress)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(_document(report))).decode())
    else:
        _show(report)
    return 0


def _ages(use: Use) -> dict[str, int]:
    return {name: n for (name, _), n in zip(AGES, use.by_age, strict=True)}


def _numbers(use: Use) -> dict[str, object]:
    return {"chunks": use.chunks, "bytes": use.bytes, "by_age": _ages(use)}


def _document(report: UseReport) -> dict[str, object]:
    namespaces = []
    for digest, use in _largest(report.namespaces):
        document = report.documents.get(digest)
        known = None
        if document is not None:
            names = ("model", "revision", "dtype", "tenant", "content_format", "blocks_per_chunk")
            known = {name: getattr(document, name) for name in names}
        namespaces.append({"namespace": digest, "known": known, **_numbers(use)})
    tenants = [{"tenant": t, **_numbers(use)} for t, use in report.by_tenant().items()]
    return {
        "store": report.store,
        "id": report.id,
        "total": _numbers(report.total()),
        "other_bytes": report.other_bytes,
        "namespaces": namespaces,
        "tenants": tenants,
    }


def _largest(uses: dict[str, Use]) -> list[tuple[str, Use]]:
    return sorted(uses.items(), key=lambda pair: (-pair[1].bytes, pair[0]))


def _show(report: UseReport) -> None:
    ages = [f">{name}" for name, _ in AGES]
    by_namespace = table(
        f"store {report.id or '?'} at {report.store}",
        *("namespace", "model", "dtype", "tenant", ">chunks", ">bytes"),
        *ages,
    )
    for digest, use in _largest(report.namespaces):
        known = report.documents.get(digest)
        names = (
            ("?", "?", "?") if known is None else (known.model, known.dtype, known.tenant or "-")
        )
        by_namespace.add_row(digest, *names, *_row(use))
    total = report.total()
    by_namespace.add_section()
    by_namespace.add_row("total", "", "", "", *_row(total))
    by_namespace.caption = (
        f"ages are of the last use; {size(report.other_bytes)} besides that are no chunks"
    )
    tables = [by_namespace]
    tenants = report.by_tenant()
    if len(tenants) > 1:
        by_tenant = table("", "tenant", ">chunks", ">bytes", *ages)
        for tenant, use in sorted(tenants.items(), key=lambda pair: -pair[1].bytes):
            by_tenant.add_row("?" if tenant is None else tenant or "-", *_row(use))
        tables.append(by_tenant)
    show(*tables)


def _row(use: Use) -> list[str]:
    return [str(use.chunks), size(use.bytes), *(size(n) if n else "-" for n in use.by_age)]
