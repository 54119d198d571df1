"""These tests import vLLM; where it is not installed they are not even collected."""

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

# The kits of the devices' own tests: a CUDA driver in host memory.
sys.path.append(str(Path(__file__).parent.parent / "adapters"))

try:
    # Not "vllm": this folder would be found under that name.
    _here = find_spec("vllm.v1") is not None
except ModuleNotFoundError:
    _here = False

collect_ignore_glob = [] if _here else ["test_*.py"]

if _here:
    # What it imports warns of deprecations, once; ours are errors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping")
