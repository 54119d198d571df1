"""`kvstrata node`: run a node in this process until it is told to stop."""

from __future__ import annotations

import asyncio

from kvstrata.cli.flags import settings_from
from kvstrata.config import NodeSettings
from kvstrata.node.process import run_node

__all__ = ["main"]


def main(argv: list[str]) -> int:
    asyncio.run(run_node(settings_from(NodeSettings, argv, "kvstrata node")))
    return 0
