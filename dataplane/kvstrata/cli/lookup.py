"""`kvstrata lookup KEY...`: which nodes hold these chunks, and in which tier."""

from __future__ import annotations

from kvstrata import api
from kvstrata.cli.cluster import add_server, checked, connect, read_keys, show, table
from kvstrata.cli.flags import Parser

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser("kvstrata lookup", "Ask the control plane who holds some chunks.")
    parser.add_argument("keys", nargs="+", metavar="KEY", help="in hexadecimal; - reads stdin")
    parser.add_argument(
        "--all",
        action="store_true",
        help="the keys are a set; without it they are a chain, of which a prefix is of use",
    )
    parser.add_argument("--node", action="append", metavar="ID", help="ask about this node only")
    add_server(parser)
    options = parser.parse_args(argv)
    keys = read_keys(options.keys)
    with checked():
        request = api.LookupRequest(
            keys=keys, mode="all" if options.all else "prefix", nodes=options.node
        )
    with connect(options) as control:
        reply = control.lookup(request)
    if options.json:
        print(reply.model_dump_json(indent=2))
        return 0
    rows = table(f"keys asked: {reply.keys}", "node", ">prefix", "tiers: found (prefix)", ">age")
    for node in reply.nodes:
        tiers = ", ".join(f"{name}: {t.found} ({t.prefix})" for name, t in node.tiers.items())
        rows.add_row(node.node, str(node.prefix), tiers, f"{node.age:.1f} s")
    if reply.nodes:
        show(rows)
    else:
        print(f"keys asked: {reply.keys}; no node holds any of them")
    return 0
