"""Wrong strides, head counts and dtypes in every adapter, in a process that may hold them all."""

import importlib.util
from pathlib import Path

import pytest
from jax_kit import needs_jax, run_cases

VLLM_TESTS = Path(__file__).parent.parent / "vllm"


@pytest.mark.timeout(240)
def test_wrong_tensors_are_refused_in_every_adapter_that_is_here() -> None:
    run_cases("refusal_cases.py", VLLM_TESTS)


@needs_jax
@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-vllm"
)
@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_wrong_tensors_are_refused_in_every_adapter() -> None:
    assert "skipped" not in run_cases("refusal_cases.py", VLLM_TESTS)
