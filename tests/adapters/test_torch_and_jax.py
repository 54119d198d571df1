"""torch and JAX engines share chunks: where both are installed, in a process of its own.

Only the environment of `make test-vllm` has torch, so this counts as one of its tests.
"""

import importlib.util

import pytest
from jax_kit import needs_jax, run_cases


@needs_jax
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-vllm"
)
@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_torch_and_jax_share_chunks() -> None:
    run_cases("torch_and_jax_cases.py")
