"""`kvstrata drain NODE`: make it safe to stop a node."""

from __future__ import annotations

import time

from kvstrata import api
from kvstrata.api import DrainInfo, DrainState
from kvstrata.cli.cluster import add_server, checked, connect, seconds, show, size, table
from kvstrata.cli.flags import Parser
from kvstrata.control import SyncControlPlane
from kvstrata.errors import Busy, Expired, LinkBroken

__all__ = ["main"]

_POLL = 0.25
# An end at the deadline is told a little after it.
_GRACE = 15.0


def main(argv: list[str]) -> int:
    parser = Parser(
        "kvstrata drain",
        "Make it safe to stop a node: it takes no new chunks, and what only it holds is written\n"
        "back to stores or moved to other nodes. Ends with 0 if the drain was accepted; with\n"
        "--wait or --status only if the node may be stopped.",
    )
    parser.add_argument("node", metavar="NODE")
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("removal", "restart"),
        default="removal",
        help="restart: its own stores are enough, since it has them again (removal)",
    )
    parser.add_argument(
        "--to",
        action="append",
        metavar="NODE",
        help="move chunks to this node and others so named only; default: any",
    )
    parser.add_argument(
        "--deadline", type=seconds, default=600.0, metavar="TIME", help="give up after (10m)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--wait", action="store_true", help="until it has ended")
    what.add_argument("--status", action="store_true", help="only show the latest drain")
    what.add_argument("--cancel", action="store_true", help="have the node serve again")
    add_server(parser)
    options = parser.parse_args(argv)
    with checked():
        request = api.DrainRequest(
            for_=options.purpose, deadline=options.deadline, targets=options.to
        )
    with connect(options) as control:
        if options.cancel:
            info = control.cancel_drain(options.node)
        elif options.status:
            info = control.drain_of(options.node)
        else:
            info = control.drain(options.node, request)
        if options.wait:
            info = _ended(control, info)
    if options.json:
        print(info.model_dump_json(indent=2))
    else:
        _show(info)
    return 0 if info.may_stop or not (options.wait or options.status) else 1


def _ended(control: SyncControlPlane, info: DrainInfo) -> DrainInfo:
    """The drain once it has ended. Raises `Expired` if the server doesn't end it."""
    until = time.monotonic() + (info.deadline - info.created) + _GRACE
    began = info.id
    while not info.state.ended and info.id == began:
        if time.monotonic() > until:
            raise Expired(f"drain {began} goes on after its deadline: see /healthz of the server")
        time.sleep(_POLL)
        try:
            info = control.drain_of(info.node)
        except (Busy, LinkBroken):  # a server that starts again goes on with it
            continue
    return info


def _show(info: DrainInfo) -> None:
    rows = table(f"{info.node}, for its {info.for_}: {info.state}", "chunks", ">", "")
    for store, chunks in info.stored.items():
        rows.add_row("written back", str(chunks), f"to {store}")
    for node, chunks in info.moved.items():
        rows.add_row("moved", str(chunks), f"to {node}")
    rows.add_row("only here", str(info.remaining.chunks), size(info.remaining.bytes))
    for left in info.left:
        rows.add_row(f"  {left.why}", str(left.chunks), left.detail)
    show(rows)
    if info.detail:
        print(info.detail)
    print(_verdict(info))


def _verdict(info: DrainInfo) -> str:
    if info.may_stop:
        return f"{info.node} may be stopped; to have it serve again: kvstrata drain --cancel"
    if not info.in_force:
        return f"{info.node} is not drained: it takes new chunks, if it is up"
    if info.state is DrainState.DRAINING:
        return f"{info.node} takes no new chunks; don't stop it yet"
    return f"{info.node} takes no new chunks; stopped now, it takes with it what is only there"
