"""The control plane as a process: killed, restarted, ended."""

import asyncio
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import trustme
from process_kit import PROGRAM, server
from server_kit import database_url, host, join, keys, report, store

from kvstrata import api
from kvstrata.api import TransferState
from kvstrata.control import ControlPlane
from kvstrata.errors import ConfigError, LinkBroken, PeerRefused


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


def test_it_ends_with_its_standard_input(tmp_path):
    command = [sys.executable, "-c", PROGRAM, "--listen", "127.0.0.1:0", "--exit-with-stdin"]
    with subprocess.Popen(
        [*command, "--database", database_url(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert "listening on" in process.stdout.readline()
        process.stdin.close()
        assert process.wait(20) == 0


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


async def test_it_serves_tls_to_who_trusts_its_certificate(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca, cert, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(ca)
    issued.private_key_pem.write_to_path(key)
    for part in issued.cert_chain_pems:
        part.write_to_path(cert, append=True)
    with server(tmp_path, "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key)) as s:
        assert s.url.startswith("https://")
        async with ControlPlane(s.url, ca=ca) as control:
            assert (await control.health()).status == "ok"
        async with ControlPlane(s.url) as stranger:
            with pytest.raises(LinkBroken, match="certificate"):
                await stranger.health()
        async with ControlPlane(s.url.replace("https", "http")) as plain:
            with pytest.raises(LinkBroken):
                await plain.health()


def test_certificates_that_cannot_be_read_say_so(tmp_path):
    with pytest.raises(ConfigError, match="PEM"):
        ControlPlane("https://127.0.0.1:1", ca=tmp_path / "none.pem")


async def test_a_token_made_beside_a_server_that_runs_is_known_to_it(tmp_path):
    database = ["--database", database_url(tmp_path)]

    def token(*arguments: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "kvstrata_server.access.token_command", *database, *arguments],
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout

    code, first = token("create", "admin", "--role", "admin")
    assert code == 0
    with server(tmp_path) as s:
        async with ControlPlane(s.url, first.strip()) as admin:
            await join(admin, "a")
            code, made = token("create", "dashboards", "--role", "read", "--expires", "1h")
            assert code == 0
            async with ControlPlane(s.url, made.strip()) as reader:

                async def known() -> bool:
                    try:
                        return [n.id for n in (await reader.nodes()).nodes] == ["a"]
                    except PeerRefused:
                        return False

                async with asyncio.timeout(20):
                    while not await known():  # noqa: ASYNC110 - another process
                        await asyncio.sleep(0.2)
                assert token("revoke", "dashboards")[0] == 0
                async with asyncio.timeout(20):
                    while await known():  # noqa: ASYNC110 - another process
                        await asyncio.sleep(0.2)
    code, shown = token("list")
    assert code == 0
    assert "dashboards" in shown
    assert "revoked" in shown
    assert made.strip() not in shown
