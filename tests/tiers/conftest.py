"""Servers that several tests of tiers use, started when the first one asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def s3_credentials() -> Iterator[None]:
    """In the environment, where the usual chain looks first; no other link of it is asked."""
    obj_kit = pytest.importorskip("obj_kit", reason="needs the extras s3 and dev")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in obj_kit.CREDENTIALS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_CONFIG_FILE", "/dev/null")
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
        yield


@pytest.fixture(scope="session")
def moto(s3_credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A bucket of moto's server."""
    import obj_kit

    with obj_kit.moto(tmp_path_factory.mktemp("moto")) as server:
        yield obj_kit.connect(server)


@pytest.fixture(scope="session")
def seaweedfs(s3_credentials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """A bucket of SeaweedFS."""
    import obj_kit

    with obj_kit.seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield obj_kit.connect(server)
