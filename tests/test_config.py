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
