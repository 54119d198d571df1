"""A node's reporter beside a control plane that is killed and started again."""

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

from reporter_kit import NAMESPACE, SaidNode, hexes, reporter_of

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata.control import ControlPlane
from kvstrata.keys import Namespace
from kvstrata.testing.waiting import until

PROGRAM = "import sys; from kvstrata_server.app import main; sys.exit(main(sys.argv[1:]))"


def start(path: Path, listen: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--listen", listen,
         "--database", f"sqlite+aiosqlite:///{path}/control.sqlite"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found = re.search(r"http://(\S+)", process.stdout.readline())
    assert found
    return process, found[1]


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    process.stdout.close()


async def test_after_a_kill_everything_comes_back_and_transfers_end(tmp_path):
    source, target = SaidNode("a", stores=("s",)), SaidNode("b")
    source.gain("host", 1, 2)
    source.gain("s", 3)
    gate = asyncio.Event()
    target.pulling = lambda pull: gate.wait()
    server, address = await asyncio.to_thread(start, tmp_path, "127.0.0.1:0")
    url = f"http://{address}"
    reporters = [reporter_of(node, None, url) for node in (source, target)]
    tasks = [asyncio.create_task(reporter.run()) for reporter in reporters]
    client = ControlPlane(url)

    async def prefix(*numbers: int) -> int:
        reply = await client.lookup(api.LookupRequest(keys=hexes(*numbers), nodes=["a"]))
        return max((n.prefix for n in reply.nodes), default=0)

    async def grows_to(wanted: int, *numbers: int) -> None:
        async with asyncio.timeout(20):
            while await prefix(*numbers) != wanted:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.01)

    try:
        await grows_to(3, 1, 2, 3)
        asked = api.TransferRequest(target="b", keys=hexes(1, 2))
        made = await client.create_transfer(asked)
        await until(lambda: target.pulls)
        # The last report before the kill may be in SQL or not: both have to do.
        source.gain("host", 4)
        await grows_to(4, 1, 2, 3, 4)
        kill(server)
        source.gain("host", 5)
        await until(lambda: not all(r.status == "connected" for r in reporters))
        server, _ = await asyncio.to_thread(start, tmp_path, address)
        await grows_to(5, 1, 2, 3, 4, 5)
        gate.set()
        async with asyncio.timeout(30):
            while not (info := await client.get_transfer(made.id)).state.ended:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert info.state is TransferState.DONE
        assert len(target.pulls) == 1
        (known,) = (await client.namespaces()).namespaces
        assert known.digest == NAMESPACE.digest.hex()
        assert Namespace.parse(target.pulls[0].namespaces[0]) == NAMESPACE
    finally:
        for reporter in reporters:
            await reporter.close()
        await asyncio.gather(*tasks)
        await client.close()
        kill(server)
