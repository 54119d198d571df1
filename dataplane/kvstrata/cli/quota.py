"""`kvstrata quota`: how much tenants may hold and move, and what they do."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.table import Table

from kvstrata import api
from kvstrata.cli.cluster import add_server, checked, connect, show, size, table
from kvstrata.cli.flags import Parser
from kvstrata.control import SyncControlPlane

__all__ = ["main"]

_PAGE = 1000
_SIZE = TypeAdapter(ByteSize)


def main(argv: list[str]) -> int:
    options = _parse(argv)
    with connect(options) as control:
        if options.act == "list":
            quotas = _all(control)
        elif options.act == "set":
            with checked():
                asked = api.QuotaRequest(
                    max_bytes=options.max_bytes,
                    max_transfers=options.max_transfers,
                    max_transfer_bytes=options.max_transfer_bytes,
                )
            quotas = [control.put_quota(options.tenant, asked)]
        elif options.act == "delete":
            quotas = [control.delete_quota(options.tenant)]
        else:
            quotas = [control.quota(options.tenant)]
    if options.json and options.act == "list":
        print(api.QuotaList(quotas=quotas).model_dump_json(indent=2))
    elif options.json:
        print(quotas[0].model_dump_json(indent=2))
    else:
        show(_table(quotas))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "kvstrata quota",
        "How much tenants may hold and move. A tenant is named as in the documents of its\n"
        "namespaces; `default` is the tenant of those that have none.",
    )
    acts = parser.add_subparsers(dest="act", required=True, metavar="ACT", parser_class=Parser)

    def act(name: str, about: str) -> Parser:
        return acts.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")

    listed = act("list", "tenants with their quotas and what they hold")
    shown = act("show", "one tenant")
    made = act("set", "set all bounds of a tenant; those left out are none")
    ended = act("delete", "take a tenant's bounds away")
    for each in (shown, made, ended):
        each.add_argument("tenant", metavar="TENANT")
    made.add_argument(
        "--max-bytes", type=_bytes, metavar="SIZE", help="held in the cluster, as in 512GiB"
    )
    made.add_argument("--max-transfers", type=int, metavar="N", help="under way at once")
    made.add_argument("--max-transfer-bytes", type=_bytes, metavar="SIZE", help="under way at once")
    for each in (listed, shown, made, ended):
        add_server(each)
    return parser.parse_args(argv)


def _bytes(text: str) -> int:
    try:
        return int(_SIZE.validate_python(text))
    except ValidationError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: write 512GiB, 1.5TiB or a number of bytes"
        ) from None


def _all(control: SyncControlPlane) -> list[api.QuotaInfo]:
    quotas: list[api.QuotaInfo] = []
    after: str | None = None
    while True:
        page = control.quotas(after, _PAGE)
        quotas += page.quotas
        after = page.next
        if after is None:
            return quotas


def _table(quotas: Sequence[api.QuotaInfo]) -> Table:
    rows = table(
        "Tenants",
        *("tenant", ">held", ">of", ">", ">transfers", ">of", ">moving", ">of", ""),
    )
    for quota in quotas:
        use, most = quota.use, quota.max_bytes
        rows.add_row(
            quota.tenant,
            size(use.bytes),
            _bound(None if most is None else size(most)),
            f"{100 * use.bytes / most:.0f} %" if most else "",
            str(use.transfers),
            _bound(None if quota.max_transfers is None else str(quota.max_transfers)),
            size(use.transfer_bytes),
            _bound(None if quota.max_transfer_bytes is None else size(quota.max_transfer_bytes)),
            "" if quota.eviction is None else f"eviction {quota.eviction}",
        )
    ages = [quota.use.age for quota in quotas]
    if None in ages:
        rows.caption = "nothing was counted yet: ask again in a moment"
    return rows


def _bound(text: str | None) -> str:
    return "-" if text is None else text
