"""The process around a node: it runs until a signal or, for a private node, until its standard
input closes."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Sequence

from kvstrata.config import NodeSettings
from kvstrata.node.process import Node
from kvstrata.standard_input import at_end_of_stdin

__all__ = ["run_node"]

_log = logging.getLogger(__name__)


async def run_node(
    settings: NodeSettings, ended: Callable[[Sequence[str]], object] = lambda stuck: None
) -> None:
    """Run a node until SIGTERM, SIGINT or (`exit_with_stdin`) the end of standard input.

    `ended` is told when it is over, and what is stuck: the end of the event loop and of the
    interpreter would wait for that without end.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if settings.exit_with_stdin:
        at_end_of_stdin(loop, stop.set)
    node = Node(settings)
    # A start can take long, and must be stoppable.
    starting, stopping = asyncio.create_task(node.open()), asyncio.create_task(stop.wait())
    try:
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not starting.done():
                starting.cancel()
                # What is open already may take `stop_deadline` to close, and before that a part
                # that opens may not heed us.
                await asyncio.wait({starting}, timeout=2 * settings.stop_deadline)
        if not starting.done():
            _log.error("the start did not end in time")
            return
        if starting.cancelled():
            return
        starting.result()
        try:
            _log.info("node %s serves engines at %s", settings.id, settings.socket_path)
            await stop.wait()
        finally:
            await node.close()
    finally:
        ended(node.stuck if starting.done() else [*node.stuck, "start"])
