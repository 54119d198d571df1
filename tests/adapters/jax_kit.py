"""JAX on four simulated devices. Import it before anything that touches a JAX backend.

JAX runs threads and warns at every fork once it has a backend, so its tests run in processes of
their own: `run_cases` runs a file that pytest doesn't collect by itself.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None,
    reason="jax is not installed: pip install 'kvstrata[jax]'",
)


def run_cases(name: str, *folders: Path) -> str:
    """The tests of a file beside this one, in another process; what that printed.

    It fails with that. `folders`: of modules that the tests import besides.
    """
    cases = Path(__file__).with_name(name)
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "PYTHONPATH": os.pathsep.join(
            [str(cases.parent), *map(str, folders), os.environ.get("PYTHONPATH", "")]
        ),
    }
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=5"]
    options += ["-p", "no:faulthandler"]  # the interpreter's own writes where we can read it
    # Two of some sixty runs crashed (SIGSEGV); where, is not known yet. A run that died of a signal
    # is made once more, and what it left is shown.
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-m", "pytest", *options, str(cases)],
            env={n: v for n, v in environment.items() if not n.startswith("PYTEST_")},
            cwd=cases.parents[2],
            capture_output=True,
            text=True,
            timeout=85,
        )
        if done.returncode >= 0:
            break
        print(f"ended by signal {-done.returncode}:", done.stdout[-2000:], done.stderr[-8000:])
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout
