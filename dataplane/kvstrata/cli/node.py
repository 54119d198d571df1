"""`kvstrata node`: run a node in this process until it is told to stop."""

from __future__ import annotations

import asyncio
import logging

from kvstrata.cli.flags import settings_from
from kvstrata.config import NodeSettings
from kvstrata.node.process import run_node

__all__ = ["main"]


def main(argv: list[str]) -> int:
    settings = settings_from(NodeSettings, argv, "kvstrata node")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line a heartbeat otherwise
    asyncio.run(run_node(settings))
    return 0
