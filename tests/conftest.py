"""What holds for all tests: an example may take its time, and the long tests begin first."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is.
settings.register_profile(
    "kvstrata", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvstrata")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that were given longer than others to run before all that were not: one that begins
    last would run alone, with the other cores idle. They go on as they stand otherwise."""
    items.sort(key=lambda item: -_seconds(item))


def _seconds(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return cast(float, mark.args[0]) if mark is not None and mark.args else 0.0
