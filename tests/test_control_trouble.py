"""A control plane that runs, asked in the wrong way: what is told is what to change."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from kvstrata.control import ControlPlane, SyncControlPlane
from kvstrata.errors import LinkBroken

ISSUER = trustme.CA()


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that turn away are what is tested."""


@contextmanager
def server(issued: trustme.LeafCert | None) -> Iterator[int]:
    """Its port, on loopback; with a certificate it speaks TLS."""
    with Quiet(("127.0.0.1", 0), BaseHTTPRequestHandler) as serving:
        if issued is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            issued.configure_cert(context)
            serving.socket = context.wrap_socket(serving.socket, server_side=True)
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield serving.server_address[1]
        finally:
            serving.shutdown()
            thread.join()


async def told(url: str, ca: Path | None = None) -> str:
    """What both clients say."""
    async with ControlPlane(url, ca=ca) as control:
        with pytest.raises(LinkBroken) as said:
            await control.health()
    with SyncControlPlane(url, ca=ca) as waiting, pytest.raises(LinkBroken) as said_too:
        waiting.health()
    assert str(said.value).rpartition("(")[2] == str(said_too.value).rpartition("(")[2]
    return str(said.value)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    path = tmp_path / "ca.pem"
    ISSUER.cert_pem.write_to_path(path)
    return path


async def test_tls_where_there_is_none() -> None:
    with server(None) as port:
        assert "begins with http://" in await told(f"https://127.0.0.1:{port}")


async def test_no_tls_where_there_is_some() -> None:
    with server(ISSUER.issue_cert("127.0.0.1")) as port:
        assert "begins with https://" in await told(f"http://127.0.0.1:{port}")


async def test_an_issuer_of_ones_own() -> None:
    with server(ISSUER.issue_cert("127.0.0.1")) as port:
        said = await told(f"https://127.0.0.1:{port}")
    assert "control.ca of a node, --ca or KVSTRATA_CA" in said


async def test_a_certificate_for_another_name(ca: Path) -> None:
    with server(ISSUER.issue_cert("kvstrata.example")) as port:
        assert "as its certificate does" in await told(f"https://127.0.0.1:{port}", ca)


async def test_a_certificate_that_is_out_of_date(ca: Path) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    with server(ISSUER.issue_cert("127.0.0.1", not_after=yesterday)) as port:
        assert "valid now" in await told(f"https://127.0.0.1:{port}", ca)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_nobody_there(scheme: str) -> None:
    with server(None) as port:
        pass
    assert "does `kvstrata server` run there?" in await told(f"{scheme}://127.0.0.1:{port}")
