"""The JAX device, in a process of its own."""

import pytest
from jax_kit import needs_jax, run_cases


@needs_jax
@pytest.mark.timeout(180)
def test_the_device_of_jax() -> None:
    run_cases("jax_device_cases.py")
