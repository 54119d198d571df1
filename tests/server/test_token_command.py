"""`kvstrata token` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstrata.errors import ConfigError
from kvstrata_server.access.token_command import main


def test_the_database_is_named_before_the_act_or_after_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment is another one, which is not to be touched."""
    monkeypatch.setenv("KVSTRATA_SERVER_DATABASE", f"sqlite+aiosqlite:///{tmp_path}/other")
    database = ["--database", f"sqlite+aiosqlite:///{tmp_path}/index"]
    assert main(["create", "first", "--role", "read", *database]) == 0
    out, err = capsys.readouterr()
    assert len(out.split()) == 1
    assert err == f"made in sqlite+aiosqlite:///{tmp_path}/index\n"
    assert main([*database, "create", "--role", "read", "second"]) == 0
    assert main(["revoke", *database, "first"]) == 0
    capsys.readouterr()
    assert main(["list", *database]) == 0
    shown = capsys.readouterr().out
    assert "first" in shown
    assert "second" in shown
    assert "revoked" in shown
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["create", "x"], "--role"),
        (["create", "x", "--role", "king"], "invalid choice: 'king'"),
        (["revoke"], "name"),
        ([], "ACT"),
    ],
)
def test_what_is_mistyped_is_told_in_one_line(arguments: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        main(arguments)
