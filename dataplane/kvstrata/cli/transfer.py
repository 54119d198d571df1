"""`kvstrata transfer KEY... --to NODE`: have chunks moved to a node."""

from __future__ import annotations

import time

from kvstrata import api
from kvstrata.api import TransferInfo, TransferState
from kvstrata.cli.cluster import (
    add_server,
    checked,
    connect,
    read_keys,
    seconds,
    show,
    size,
    table,
)
from kvstrata.cli.flags import Parser
from kvstrata.control import SyncControlPlane
from kvstrata.errors import Expired

__all__ = ["main", "wait_for"]

_POLL = 0.1


def main(argv: list[str]) -> int:
    parser = Parser(
        "kvstrata transfer",
        "Have chunks moved to a node. The target pulls them from a node that holds them.\n"
        "Ends with 0 if the transfer was accepted; with --wait only if every chunk is there.",
    )
    parser.add_argument("keys", nargs="+", metavar="KEY", help="in hexadecimal; - reads stdin")
    parser.add_argument("--to", required=True, metavar="NODE", help="who shall hold them")
    parser.add_argument("--from", dest="source", default="any", metavar="NODE", help="or any")
    parser.add_argument("--wait", action="store_true", help="until it has ended")
    parser.add_argument("--dry-run", action="store_true", help="only say what would move")
    parser.add_argument(
        "--deadline", type=seconds, default=60.0, metavar="TIME", help="give up after (60s)"
    )
    parser.add_argument(
        "--hold", type=seconds, default=60.0, metavar="TIME", help="keep them leased for (60s)"
    )
    parser.add_argument("--priority", type=int, default=5, choices=range(10), metavar="0-9")
    add_server(parser)
    options = parser.parse_args(argv)
    keys = read_keys(options.keys)
    with checked():
        request = api.TransferRequest(
            target=options.to,
            keys=keys,
            source=options.source,
            priority=options.priority,
            deadline=options.deadline,
            hold=options.hold,
            dry_run=options.dry_run,
        )
    with connect(options) as control:
        info = control.create_transfer(request)
        if options.wait and not options.dry_run:
            info = wait_for(control, info, options.deadline + 5.0)
    if options.json:
        print(info.model_dump_json(indent=2))
    else:
        _show(info)
    waited = options.wait and not options.dry_run
    return 0 if not waited or info.state is TransferState.DONE else 1


def wait_for(control: SyncControlPlane, info: TransferInfo, timeout: float) -> TransferInfo:
    """The transfer once it has ended. Raises `Expired` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not info.state.ended:
        if time.monotonic() > deadline:
            raise Expired(f"transfer {info.id} is still {info.state} after {timeout:.0f} s")
        time.sleep(_POLL)
        info = control.get_transfer(info.id)
    return info


def _show(info: TransferInfo) -> None:
    rows = table(f"transfer {info.id} to {info.target}: {info.state}", "outcome", ">chunks")
    for outcome, count in sorted(info.counts.items()):
        rows.add_row(str(outcome), str(count))
    rows.caption = f"{size(info.bytes)} {'to move' if info.state == 'planned' else 'moved'}"
    show(rows)
    if info.detail:
        print(info.detail)
