"""Which of the flags, the environment and the file a setting comes from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvstrata.config import NodeSettings, ServerSettings, TierSettings
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
