"""The command line: one schema, commands found by name, errors in one line, exit statuses."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstrata import api
from kvstrata.cli import dispatch, main
from kvstrata.cli.cluster import show, size, table
from kvstrata.cli.flags import settings_from
from kvstrata.client import Client
from kvstrata.config import NodeSettings, ServerSettings
from kvstrata.errors import Busy, ConfigError, LinkBroken
from kvstrata.testing.chunks import a_namespace

NAMESPACE = a_namespace(128, blocks_per_chunk=4)
KEYS = [NAMESPACE.key(0, bytes([i]) * 32) for i in range(4)]
TOKEN = "a-token-for-tests"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVSTRATA_"):
            monkeypatch.delenv(name)


# ---------------------------------------------------------------- which command


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    for command in ("server", "node", "demo", "lookup", "transfer", "status", "simulate"):
        assert f"\n  {command} " in listed


def test_nothing_heavy_is_loaded_for_help() -> None:
    code = (
        "import sys; from kvstrata.cli import main; main(['--help'])\n"
        "print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = out.stdout.splitlines()[-1]
    for heavy in ("pydantic", "httpx", "zmq", "numpy", "rich", "fastapi"):
        assert f"'{heavy}'" not in loaded


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvstrata", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("kvstrata 0.")


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_an_unknown_command_names_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sever"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("kvstrata: no command 'sever'")
    assert "server" in told


@pytest.mark.parametrize(
    ("name", "advice"),
    [("server", "pip install 'kvstrata[server]'"), ("other", "install no_such_library")],
)
def test_a_missing_extra_is_named(
    name: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    absent = EntryPoint(name, "no_such_library.app:main", dispatch.GROUP)
    monkeypatch.setattr(
        dispatch, "entry_points", lambda **which: EntryPoints([absent]).select(**which)
    )
    assert main([name]) == 2
    told = capsys.readouterr().err
    assert told == f"kvstrata: `kvstrata {name}` needs no_such_library: {advice}\n"


def refuse(argv: list[str]) -> int:
    raise {
        "busy": Busy("try\nlater"),
        "config": ConfigError("change x"),
        "file": PermissionError(13, "Permission denied", "/x"),
    }[argv[0]]


def interrupted(argv: list[str]) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("command", "args", "status", "told"),
    [
        ("refuse", ["busy"], 1, "kvstrata refuse: try later\n"),
        ("refuse", ["config"], 2, "kvstrata refuse: change x\n"),
        (
            "refuse",
            ["file"],
            1,
            "kvstrata refuse: /x: Permission denied: choose another path, or make it one this "
            "user may use\n",
        ),
        ("interrupted", [], 130, ""),
    ],
)
def test_errors_are_one_line_and_a_status(
    command: str,
    args: list[str],
    status: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(dispatch._BUILT_IN, command, f"{__name__}:{command}")
    assert main([command, *args]) == status
    assert capsys.readouterr().err == told


def test_an_interrupt_while_a_command_is_imported_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def import_module(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(dispatch, "import_module", import_module)
    try:
        status = main(["node"])
    except KeyboardInterrupt:
        pytest.fail("it went through")
    assert status == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    # head ends after one line; what follows is more than a pipe holds.
    code = (
        "import sys; from kvstrata.cli import dispatch\n"
        "sys.modules['chatty'] = type(sys)('chatty')\n"
        "sys.modules['chatty'].main = lambda argv: print('line\\n' * 200_000)\n"
        "dispatch._BUILT_IN['chatty'] = 'chatty:main'; sys.exit(dispatch.main(['chatty']))"
    )
    done = subprocess.run(
        f'{sys.executable} -c "$CODE" | head -n 1',
        shell=True,
        env={**os.environ, "CODE": code},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("line\n", "")


# ---------------------------------------------------------------- settings


def node_settings(*argv: str) -> NodeSettings:
    return settings_from(NodeSettings, argv, "kvstrata node")


def test_flags_win_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[node]\nid = "from-file"\nmetrics = "file:1"\n'
        '[node.host]\ncapacity = "1GiB"\nlease_ttl = "7s"\n'
        '[server]\nlisten = "127.0.0.1:1"\n'
    )
    monkeypatch.setenv("KVSTRATA_NODE_ID", "from-environment")
    monkeypatch.setenv("KVSTRATA_NODE_HOST__CAPACITY", "2GiB")
    settings = node_settings("--config", str(file), "--host.capacity", "3GiB")
    assert settings.host.capacity == 3 << 30
    assert settings.id == "from-environment"
    assert settings.metrics == "file:1"
    assert settings.host.lease_ttl == 7.0
    assert settings.host.reserve_ttl == 60.0
    assert "KVSTRATA_CONFIG" not in os.environ
    server = settings_from(ServerSettings, ["--config", str(file)], "kvstrata server")
    assert server.listen == "127.0.0.1:1"


def test_every_kind_of_flag() -> None:
    settings = node_settings(
        "--tiers",
        '[{"type": "fs", "root": "/x", "capacity": "1GiB"}, {"type": "m:C"}]',
        "--host.lease-ttl=500ms",
        "--no-host.populate",
        "--exit-with-stdin",
        '--peers.transports=["tcp"]',
        "--socket=/run/x.sock",
    )
    assert [t.type for t in settings.tiers] == ["fs", "m:C"]
    assert settings.tiers[0].options == {"root": "/x", "capacity": "1GiB"}
    assert settings.host.lease_ttl == 0.5
    assert not settings.host.populate
    assert settings.exit_with_stdin
    assert settings.peers.transports == ["tcp"]
    assert settings.socket == Path("/run/x.sock")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--host.capacity", "many"], "host.capacity: "),
        (["--host.lease-ttl", "soon"], "'soon' is not a time"),
        (["--id", "a b"], "id: "),
        (["--no-such-flag", "1"], "unrecognized arguments: --no-such-flag"),
        (["--host.cap", "1GiB"], "unrecognized arguments: --host.cap"),
        (["--host.capacity"], "expected one argument"),
        (["--config"], "expected one argument"),
        (["--config", "/no/such/file.toml"], "settings file /no/such/file.toml does not exist"),
        (["--config", "/"], "settings file / is not a file"),
        (["--tiers", "not json"], "tiers.0: must be a table"),
        (["--tiers", "[{"], "lists and tables are written as JSON"),
        (["--tiers", '[{"root": "/x"}]'], "type"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["node", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("kvstrata node: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[node]\nno_such = 1\n", "no_such"),
        ("[node\n", "settings.toml: "),
        ("[node]\nid = 3\n", "id"),
    ],
)
def test_a_wrong_file_is_told(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        node_settings("--config", str(file))


def test_a_file_that_is_no_text_is_told(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML: it must be UTF-8 text"):
        node_settings("--config", str(file))


def test_lists_in_the_environment_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_NODE_TIERS", "fs")
    with pytest.raises(ConfigError, match=r'"tiers".*: lists and tables are written as JSON'):
        node_settings()


def test_secrets_are_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        node_settings("--peers.secret", "hush", "--control.token", "hush", "--host.capacity", "x")
    assert "hush" not in str(caught.value)
    with pytest.raises(SystemExit):
        node_settings("--help")


def test_help_comes_from_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["node", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for words in ("--host.capacity", "Bytes of the shared region.", "KVSTRATA_NODE_HOST__CAPACITY"):
        assert words in told


@pytest.mark.parametrize(
    ("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_for_people(nbytes: int, text: str) -> None:
    assert size(nbytes) == text


# ---------------------------------------------------------------- lookup and transfer


def start(args: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "kvstrata", *args],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KVSTRATA_SERVER_TOKEN": TOKEN},
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real control plane that knows one node, which holds the first three keys."""
    folder = tmp_path_factory.mktemp("server")
    log = folder / "log"
    server = start(
        ["server", "--listen=127.0.0.1:0", f"--database=sqlite+aiosqlite:///{folder}/db"], log
    )
    try:
        deadline = time.monotonic() + 30
        while "listening on " not in log.read_text():
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        found = log.read_text().split("listening on ")[1].split()[0]
        _report(found)
        yield found
    finally:
        stop(server)


def _report(url: str) -> None:
    """What a node named n1 would say of itself."""
    import httpx

    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
        for node in ("n1", "n2"):
            http.post(
                "/v1/nodes",
                json={"id": node, "incarnation": "i1", "peer_address": "tcp://127.0.0.1:9"},
            ).raise_for_status()
        http.post(
            "/v1/nodes/n1/reports",
            json={
                "incarnation": "i1",
                "seq": 0,
                "changes": [{"location": "host", "added": [k.hex() for k in KEYS[:3]]}],
                "namespaces": [NAMESPACE.document.decode()],
            },
        ).raise_for_status()


@pytest.fixture
def ask(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("KVSTRATA_URL", url)
    monkeypatch.setenv("KVSTRATA_TOKEN", TOKEN)

    def run(*argv: str) -> tuple[int, str]:
        status = main(list(argv))
        return status, capsys.readouterr().out

    return run


def test_lookup_tells_who_holds_what(ask: Any) -> None:
    names = [key.hex() for key in KEYS]
    status, out = ask("lookup", *names, "--json")
    assert status == 0
    (node,) = json.loads(out)["nodes"]
    assert (node["node"], node["prefix"]) == ("n1", 3)
    assert node["tiers"]["host"] == {"found": 3, "prefix": 3, "tokens": 192}
    status, out = ask("lookup", names[3], names[1], "--all", "--node", "n1", "--json")
    assert json.loads(out)["nodes"][0]["keys"] == [names[1]]
    _, table = ask("lookup", *names)
    assert "n1" in table
    assert "host: 3 (3)" in table
    _, nobody = ask("lookup", names[3])
    assert "no node holds any of them" in nobody


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2\n3\n"])
@pytest.mark.parametrize("which", ["--namespace", "--model"])
def test_lookup_of_a_prompt(
    text: str, which: str, ask: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server, where they have arrived, can't hash token ids of this namespace."""
    prompt = tmp_path / "prompt"
    prompt.write_text(text)
    name = NAMESPACE.digest.hex() if which == "--namespace" else NAMESPACE.model
    assert main(["lookup", "--tokens", str(prompt), which, name]) == 1
    assert "`hash_seeds`" in capsys.readouterr().err
    other = ["--model", "m", "--revision", "r", "--tenant", "t"]
    assert main(["lookup", "--tokens", str(prompt), *other]) == 1
    assert "chunks of m, revision r, tenant 't'" in capsys.readouterr().err


def test_lookup_reads_keys_from_stdin(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(key.hex() for key in KEYS[:2]) + "\n"))
    _, out = ask("lookup", "-", "--json")
    assert json.loads(out)["keys"] == 2


def test_a_transfer_is_planned_accepted_and_waited_for(ask: Any) -> None:
    names = [key.hex() for key in KEYS[:3]]
    status, out = ask("transfer", *names, "--to", "n2", "--from", "n1", "--dry-run", "--json")
    planned = json.loads(out)
    assert (status, planned["state"]) == (0, "planned")
    assert planned["bytes"] == 3 * NAMESPACE.chunk_bytes[0]
    status, out = ask("transfer", *names, "--to", "n2")
    assert status == 0
    assert "queued" in out
    # Nobody polls for commands as n2, so it can only expire.
    status, out = ask("transfer", *names, "--to", "n2", "--wait", "--deadline", "500ms", "--json")
    assert (status, json.loads(out)["state"]) == (1, "expired")


def test_a_drain_is_accepted_waited_for_and_cancelled(ask: Any) -> None:
    # Nobody beats as n1, so only the deadline can end it.
    status, out = ask("drain", "n1", "--to", "n2", "--deadline", "1s")
    assert status == 0
    assert "n1, for its removal: draining" in out
    assert "only here" in out
    assert "3" in out
    assert "don't stop it yet" in out
    _, listed = ask("status")
    assert "draining" in listed
    status, out = ask("drain", "n1", "--to", "n2", "--wait", "--json")
    info = json.loads(out)
    assert (status, info["state"], info["for"], info["may_stop"]) == (
        *(1, "partial", "removal"),
        False,
    )
    assert info["remaining"]["chunks"] == 3
    status, out = ask("drain", "n1", "--status")
    assert status == 1
    assert "it has not said that it takes no new chunks" in out
    status, out = ask("drain", "n1", "--cancel")
    assert status == 0
    assert "n1 is not drained" in out


def test_quotas_are_set_shown_listed_and_deleted(ask: Any) -> None:
    status, out = ask("quota", "set", "acme", "--max-bytes", "1.5GiB", "--max-transfers", "3")
    assert status == 0
    assert "1.5 GiB" in out
    _, out = ask("quota", "set", "~default", "--max-transfer-bytes", "1000", "--json")
    assert json.loads(out)["max_transfer_bytes"] == 1000
    _, out = ask("quota", "show", "acme", "--json")
    shown = json.loads(out)
    assert (shown["tenant"], shown["max_bytes"], shown["max_transfers"]) == ("acme", 3 << 29, 3)
    _, out = ask("quota", "list", "--json")
    assert {"acme", "~default"} <= {quota["tenant"] for quota in json.loads(out)["quotas"]}
    _, out = ask("quota", "list")
    assert "acme" in out
    assert ask("quota", "delete", "acme")[0] == ask("quota", "delete", "~default")[0] == 0


@pytest.mark.parametrize(
    ("argv", "status", "told"),
    [
        (["drain", "n1", "--wait", "--cancel"], 2, "not allowed with"),
        (["drain", "n1", "--for", "fun"], 2, "invalid choice"),
        (["drain", "n2", "--status"], 1, "was not drained"),
        (["drain", "no-such-node"], 1, "no-such-node"),
        (["drain", "n1", "--deadline", "9d"], 2, "deadline: "),
        (["quota", "show", "nobody"], 1, "'nobody' has no quota"),
        (["quota", "set", "acme", "--max-bytes", "much"], 2, "'much' is not a size"),
        (["quota", "set", "acme", "--max-transfers", "0"], 2, "max_transfers"),
        (["quota"], 2, "required: ACT"),
        (["lookup", "zz"], 2, "'zz' is not a chunk key"),
        (["lookup"], 2, "give keys, or --tokens"),
        (["lookup", KEYS[0].hex(), "--tokens", "-"], 2, "give keys, or --tokens"),
        (["lookup", "--tokens", "no-such-file", "--model", "m"], 2, "no-such-file"),
        (["lookup", "--tokens", __file__, "--model", "m"], 2, "token ids"),
        (["lookup", "--tokens", os.devnull], 2, "--model or --namespace"),
        (["lookup", "--tokens", os.devnull, "--namespace", "zz"], 2, "namespace: "),
        (["lookup", "--tokens", os.devnull, "--model", "m", "--all"], 2, "--all is of keys"),
        (["transfer", KEYS[0].hex()], 2, "required: --to"),
        (["transfer", KEYS[0].hex(), "--to", "n", "--hold", "ever"], 2, "'ever' is not a time"),
        (["transfer", KEYS[0].hex(), "--to", "n", "--deadline", "9d"], 2, "deadline: "),
        (["transfer", KEYS[0].hex(), "--to", "no-such-node"], 1, "no-such-node"),
        (["lookup", KEYS[0].hex(), "--url", "http://h:port"], 2, "a host and a port"),
        (["lookup", KEYS[0].hex(), "--url", "nonsense"], 2, "must be http://"),
        (["lookup", KEYS[0].hex(), "--url", "http://127.0.0.1:9"], 1, "kvstrata server"),
        (["lookup", KEYS[0].hex(), "--token", "wrong"], 1, "--token"),
    ],
)
def test_refusals_are_told_in_one_line(
    argv: list[str], status: int, told: str, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == status
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------- tables


def test_nothing_in_a_table_is_cut_or_taken_for_markup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    rows = table("transfer 0123456789abcdef-0123456789abcdef", "node", ">address")
    rows.add_row("[/var]:key:", "tcp://127.0.0.1:12345")
    rows.caption = "1.0 MiB moved"
    show(rows)
    title, *body, caption = capsys.readouterr().out.splitlines()
    assert title == "transfer 0123456789abcdef-0123456789abcdef"
    assert caption == "1.0 MiB moved"
    cells = [line.strip("│").split("│") for line in body if line.startswith("│")]
    columns = ["".join(cell.strip() for cell in column) for column in zip(*cells, strict=True)]
    assert columns == ["[/var]:key:", "tcp://127.0.0.1:12345"]


# ---------------------------------------------------------------- status


def test_status_of_the_cluster(ask: Any) -> None:
    status, out = ask("status", "--json")
    assert status == 0
    assert {node["id"] for node in json.loads(out)["nodes"]} == {"n1", "n2"}
    _, table = ask("status")
    assert "n1" in table
    assert "control plane" in table


def test_reasons_stand_below_the_table_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    detail = "fs: full since 2026-11-30T02:06:43Z: " + "free some of its disk, or " * 4
    well = api.NodeInfo(
        id="well",
        incarnation="i",
        state="up",
        peer_address="tcp://198.51.100.200:7801",
        transports=["tcp"],
        host=api.HostUse(used_bytes=0, capacity_bytes=1, chunks=0),
        stores=[],
        healthy=True,
        detail="",
        heartbeat_age=0.1,
    )
    ill = well.model_copy(
        update={
            "id": "ill",
            "healthy": False,
            "detail": detail,
            "drain": "draining",
            "version": "0.9",
        }
    )

    @contextmanager
    def connect(options: object) -> Iterator[Any]:
        yield SimpleNamespace(
            health=lambda: SimpleNamespace(status="ok", version="1.0"),
            nodes=lambda: api.NodeList(nodes=[ill, well]),
        )

    monkeypatch.setattr("kvstrata.cli.status.connect", connect)
    assert main(["status", "--url", "http://127.0.0.1:1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"ill: {detail}" in lines
    assert "of version 0.9: ill" in lines
    rows = [line for line in lines if line.startswith("│")]
    assert len([line for line in rows if "ill" in line]) == 1
    assert not any("full" in line for line in rows)


@pytest.fixture(scope="module")
def socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A real node with a session that registered a namespace."""
    folder = tmp_path_factory.mktemp("node")
    socket, log = folder / "n.sock", folder / "log"
    node = start(
        ["node", "--id=cli", f"--socket={socket}", "--host.capacity=1MiB", "--exit-with-stdin"], log
    )
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                client = Client.connect(socket, "engine", namespace=NAMESPACE)
                break
            except LinkBroken:
                assert node.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        with client:
            yield socket
    finally:
        stop(node)


def test_status_of_a_node(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--socket", str(socket), "--json"]) == 0
    status = msgspec.json.decode(capsys.readouterr().out)
    assert status["node"] == "cli"
    assert status["namespaces"] == [NAMESPACE.digest.hex()]
    (host,) = status["tiers"]
    assert (host["name"], host["capacity_bytes"], host["chunks"]) == ("host", 1 << 20, 0)
    assert main(["status", "--socket", str(socket)]) == 0
    assert "1.0 MiB" in capsys.readouterr().out


def test_the_only_node_of_a_host_needs_no_name(
    socket: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 2
    assert "name a node with --socket" in capsys.readouterr().err
    (tmp_path / "kvstrata").mkdir()
    (tmp_path / "kvstrata" / "gone.sock").touch()
    assert main(["status"]) == 1
    assert "start one with `kvstrata node`" in capsys.readouterr().err
    monkeypatch.setenv("KVSTRATA_NODE_SOCKET", str(socket))
    assert main(["status"]) == 0
