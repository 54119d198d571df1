from __future__ import annotations

import pytest

from kvstrata.addresses import is_loopback, split_address
from kvstrata.errors import ConfigError


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("", False), ("::", False), ("host.example", False)],
)  # fmt: skip
def test_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("text", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80)), (":0", ("", 0))],
)
def test_addresses(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize("text", ["127.0.0.1", "host:", "host:http", "host:99999", "host:²", ""])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="write host:port"):
        split_address(text)
