"""The control plane as a process: killed, restarted, ended."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from server_kit import database_url, host, join, keys, report, store

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata.control import ControlPlane
from kvstrata.errors import LinkBroken

PROGRAM = "import sys; from kvstrata_server.app import main; sys.exit(main(sys.argv[1:]))"


class Server:
    def __init__(self, path: Path, listen: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "--listen", listen, "--database", database_url(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        found = re.fullmatch(r"kvstrata server: listening on (http://127\.0\.0\.1:\d+)\n", line)
        assert found, f"the server said {line!r}"
        self.url = found[1]

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        code = self.process.wait(20)
        self.process.stdout.close()
        return code


@contextmanager
def server(path: Path, listen: str = "127.0.0.1:0") -> Iterator[Server]:
    started = Server(path, listen)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.end(signal.SIGKILL)


async def written(control: ControlPlane) -> None:
    """Until SQL has everything."""
    async with asyncio.timeout(20):
        while (await control.health()).unwritten_rows:  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.01)


async def test_killed_and_restarted_it_goes_on(tmp_path):
    with server(tmp_path) as first:
        async with ControlPlane(first.url) as control:
            for node in "ab":
                await join(control, node, stores=(f"s{node}",))
            await control.report("a", report(0, host(keys(0, 1)), store("sa", keys(2))))
            asked = api.TransferRequest(target="b", keys=keys(0, 1, 2))
            made = await control.create_transfer(asked, "once")
            taken = api.Progress(incarnation="i1", transfer=made.id, final=False)
            assert (await control.progress("b", taken)).state is TransferState.RUNNING
            await written(control)
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
    listen = first.url.removeprefix("http://")
    with server(tmp_path, listen) as second:
        async with ControlPlane(second.url) as control:
            lookup = api.LookupRequest(keys=keys(0, 1, 2))
            # Who hasn't spoken since is not offered.
            assert (await control.lookup(lookup)).nodes == []
            use = api.HostUse(used_bytes=0, capacity_bytes=0, chunks=0)
            beat = api.HeartbeatRequest(incarnation="i1", host=use, next_seq=1)
            assert not (await control.heartbeat("a", beat)).snapshot_wanted
            assert [n.prefix for n in (await control.lookup(lookup)).nodes] == [3]
            assert (await control.report("a", report(1, host(keys(3))))).applied
            assert (await control.create_transfer(asked, "once")).id == made.id
            (command,) = (await control.commands("b", "i1", wait=5)).commands
            assert (command.transfer, command.keys) == (made.id, keys(0, 1, 2))
            done = api.Progress(
                incarnation="i1",
                transfer=made.id,
                final=True,
                outcomes=dict.fromkeys(keys(0, 1, 2), "stored"),
            )
            assert (await control.progress("b", done)).state is TransferState.DONE
            await written(control)


async def test_what_sql_missed_is_asked_for_again(tmp_path):
    with server(tmp_path) as first:
        async with ControlPlane(first.url) as control:
            await join(control, "a")
            await control.report("a", report(0, host(keys(0))))
            await written(control)
        first.end(signal.SIGKILL)
    # As if the next report had been applied and the process killed before it was written.
    with server(tmp_path) as second:
        async with ControlPlane(second.url) as control:
            reply = await control.report("a", report(2, host(keys(2))))
            assert (reply.applied, reply.snapshot_wanted) == (False, True)
            whole = report(2, host(keys(0, 1, 2)), snapshot="only")
            assert (await control.report("a", whole)).applied
            reply = await control.lookup(api.LookupRequest(keys=keys(0, 1, 2)))
            assert [n.prefix for n in reply.nodes] == [3]


async def test_ended_politely_it_writes_everything_and_wakes_long_polls(tmp_path):
    with server(tmp_path) as first:
        async with ControlPlane(first.url) as control:
            await join(control, "a")
            await control.report("a", report(0, host(keys(*range(3000)))))
            poll = asyncio.create_task(control.commands("a", "i1", wait=30))
            await asyncio.sleep(0)
            await control.health()
            code = await asyncio.to_thread(first.end, signal.SIGTERM)
            assert code == 0
            with suppress(LinkBroken):  # it may not have arrived yet
                assert (await poll).commands == []
    with server(tmp_path) as second:
        async with ControlPlane(second.url) as control:
            assert (await join(control, "a")).next_seq == 1
            asked = api.LookupRequest(keys=keys(*range(3000)))
            assert [n.prefix for n in (await control.lookup(asked)).nodes] == [3000]
        assert second.end(signal.SIGINT) == 0


def test_a_port_in_use_is_said(tmp_path):
    with server(tmp_path) as first:
        listen = first.url.removeprefix("http://")
        second = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--listen", listen,
             "--database", database_url(tmp_path)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert second.returncode == 2
        assert "Choose another port" in second.stderr


def test_a_second_server_is_kept_off_the_database(tmp_path):
    with server(tmp_path):
        second = subprocess.run(
            [sys.executable, "-c", PROGRAM, "--listen", "127.0.0.1:0",
             "--database", database_url(tmp_path)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert second.returncode == 2
        assert "another control plane" in second.stderr
