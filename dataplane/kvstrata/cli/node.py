"""`kvstrata node`: run a node in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Sequence

from kvstrata.cli.flags import settings_from
from kvstrata.config import NodeSettings
from kvstrata.node.run import run_node

__all__ = ["main"]

_LEAVE_SECONDS = 5.0


def main(argv: list[str]) -> int:
    settings = settings_from(NodeSettings, argv, "kvstrata node")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a heartbeat otherwise
    asyncio.run(run_node(settings, _leave))
    return 0


def _leave(stuck: Sequence[str]) -> None:
    """The node has ended, and so must its process. The interpreter would wait for threads that
    hang in a system call: at once where there are such, else should the end take long."""

    def leave() -> None:
        error = sys.exc_info()[1]
        if error is not None:
            print(f"kvstrata node: {error}", file=sys.stderr)
        logging.getLogger(__name__).error("left without the threads that hang")
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    if stuck:
        leave()
    timer = threading.Timer(_LEAVE_SECONDS, leave)
    timer.daemon = True
    timer.start()
