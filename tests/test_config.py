from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvstrata.config import (
    ControlSettings,
    NodeSettings,
    ServerSettings,
    TierSettings,
    parse_seconds,
    run_dir,
    what_is_wrong,
)
from kvstrata.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVSTRATA_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings file; write to it."""
    path = tmp_path / "kvstrata.toml"
    monkeypatch.setenv("KVSTRATA_CONFIG", str(path))
    return path


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("30s", 30.0),
        ("200ms", 0.2),
        ("1.5s", 1.5),
        ("5m", 300.0),
        ("5min", 300.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        (" 10 s ", 10.0),
        ("10", 10.0),
        (10, 10),
        (timedelta(minutes=1), 60.0),
    ],
)
def test_times_are_human(value: object, seconds: float) -> None:
    assert parse_seconds(value) == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["soon", "", "10 parsecs", "-1s", "1s2m", "s"])
def test_what_is_not_a_time(value: str) -> None:
    with pytest.raises(ValueError, match="is not a time: write 30s"):
        parse_seconds(value)


@pytest.mark.parametrize("value", ["0s", "-1", "1.2.3s", "nan", float("nan"), float("inf")])
def test_times_are_positive_and_end(value: object) -> None:
    with pytest.raises(ValidationError, match=r"host\.lease_ttl"):
        NodeSettings.model_validate({"host": {"lease_ttl": value}})


def test_file(file: Path) -> None:
    file.write_text(
        """
        [node]
        id = "n7"
        [node.host]
        capacity = "64GiB"
        lease_ttl = "1m"
        [[node.tiers]]
        type = "fs"
        root = "/data"
        capacity = "1TiB"
        [server]
        listen = "0.0.0.0:1"
        """
    )
    node = NodeSettings()
    assert node.id == "n7"
    assert node.host.capacity == 64 << 30
    assert node.host.lease_ttl == 60.0
    assert node.host.policy == "lru"
    assert node.tiers == [TierSettings(type="fs", root="/data", capacity="1TiB")]
    assert node.tiers[0].options == {"root": "/data", "capacity": "1TiB"}
    assert ServerSettings().listen == "0.0.0.0:1"


def test_environment_over_file_and_arguments_over_both(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text('[node]\nid = "file"\nmetrics = "file:1"\n[node.host]\ncapacity = "1GiB"')
    monkeypatch.setenv("KVSTRATA_NODE_ID", "env")
    monkeypatch.setenv("KVSTRATA_NODE_HOST__CAPACITY", "2GiB")
    monkeypatch.setenv("KVSTRATA_NODE_TIERS", '[{"type": "fs", "root": "/x"}]')
    node = NodeSettings()
    assert (node.id, node.metrics, node.host.capacity) == ("env", "file:1", 2 << 30)
    assert node.tiers[0].options == {"root": "/x"}
    assert NodeSettings(id="argument").id == "argument"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[node]\nhots = 1", "hots"),
        ("[node.host]\ncapacty = 1", r"host\.capacty"),
        ("[node.peers]\nsecrets = 'x'", r"peers\.secrets"),
        ("[node.control]\nurls = 'x'", r"control\.urls"),
    ],
)
def test_unknown_names_in_the_file(file: Path, text: str, where: str) -> None:
    file.write_text(text)
    with pytest.raises(ValidationError, match=f"{where}\n  Extra inputs are not permitted"):
        NodeSettings()


def test_unknown_tables_in_the_file(file: Path) -> None:
    file.write_text("[nodes]\nid = 'x'")
    with pytest.raises(ConfigError, match=r"has \['nodes'\]: its tables are \['node', 'server'\]"):
        NodeSettings()


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        NodeSettings()


def test_unknown_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_NODE_CAPACITY", "1GiB")
    with pytest.raises(ConfigError, match="KVSTRATA_NODE_CAPACITY sets nothing"):
        NodeSettings()
    assert ServerSettings().listen  # another program's variables are its own


def test_unknown_nested_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_NODE_HOST__CAPACTY", "1GiB")
    with pytest.raises(ValidationError, match=r"host\.capacty"):
        NodeSettings()


def test_what_kubernetes_sets_for_a_service_of_our_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTRATA_SERVER_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KVSTRATA_SERVER_SERVICE_PORT_HTTP", "7800")
    monkeypatch.setenv("KVSTRATA_SERVER_PORT", "tcp://10.0.0.1:7800")
    monkeypatch.setenv("KVSTRATA_SERVER_PORT_7800_TCP_ADDR", "10.0.0.1")
    assert ServerSettings().listen == "127.0.0.1:7800"


def test_a_node_has_a_valid_default_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "büro/7 " + "x" * 100)
    assert NodeSettings().id == ("b-ro-7-" + "x" * 100)[:64]
    with pytest.raises(ValidationError, match="id"):
        NodeSettings(id="../up")


def test_sockets_live_in_the_run_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run_dir() == tmp_path / "kvstrata"
    assert NodeSettings(id="n").socket_path == tmp_path / "kvstrata" / "n.sock"
    assert NodeSettings(socket=Path("/x.sock")).socket_path == Path("/x.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_dir().name.startswith("kvstrata-")


def test_a_socket_fits_the_kernel() -> None:
    # 108 bytes with the final zero, and `.life` is appended for the lifelines.
    NodeSettings(socket=Path("/" + "s" * 101)).socket_path  # noqa: B018
    with pytest.raises(ConfigError, match="choose a shorter path"):
        NodeSettings(socket=Path("/" + "s" * 102)).socket_path  # noqa: B018


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:"])
def test_addresses_are_checked(address: str) -> None:
    with pytest.raises(ValidationError, match="write host:port"):
        NodeSettings(metrics=address)
    with pytest.raises(ValidationError, match="write host:port"):
        ServerSettings(listen=address)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"host": {"capcity": 1}}, "host.capcity: there is no such setting"),
        ({"host": {"capacity": "64gigs"}}, "host.capacity: is not a size: write 64GiB, "),
        ({"host": {"capacity": "-1"}}, "500MB or a number of bytes, got '-1'"),
        ({"host": {"lease_ttl": "soon"}}, "host.lease_ttl: 'soon' is not a time: write 30s, "),
        ({"tiers": [{"root": "/x"}]}, "tiers.0.type: this must be set"),
        ({"tiers": "fs"}, "tiers: must be a list, in flags and the environment a JSON list"),
        ({"tiers": ["fs"]}, "tiers.0: must be a table, in flags and the environment a JSON"),
        ({"id": 1, "metrics": "x"}, "id: Input should be a valid string, got 1; metrics: "),
    ],
)
def test_what_is_wrong_is_told_in_one_line(values: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NodeSettings.model_validate(values)
    assert told in what_is_wrong(caught.value)
    assert "\n" not in what_is_wrong(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"control": {"tokn": "hush"}},
        {"control": {"token": ["hush"]}},
        {"peers": {"secret": {"is": "hush"}}},
    ],
)
def test_what_is_wrong_keeps_secrets_even_misspelt(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError) as caught:
        NodeSettings.model_validate(values)
    assert "hush" not in what_is_wrong(caught.value)


@pytest.mark.parametrize("token", ["smörgås", "trailing ", "line\n"])
def test_a_token_is_what_a_header_can_carry(token: str) -> None:
    for schema in (lambda: ServerSettings(token=token), lambda: ControlSettings(token=token)):
        with pytest.raises(ValidationError) as caught:
            schema()
        assert token not in what_is_wrong(caught.value)


def test_secrets_are_not_printed() -> None:
    node = NodeSettings.model_validate({"peers": {"secret": "s3"}, "control": {"token": "t0k"}})
    assert "s3" not in repr(node)
    assert "t0k" not in repr(node)


def test_a_run_dir_that_somebody_else_has_made_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes it first in a /tmp of all could put their own node there."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"kvstrata-{os.getuid()}"
    assert run_dir() == folder  # not there yet
    folder.mkdir()
    assert run_dir() == folder
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        run_dir()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR"):
        run_dir()
