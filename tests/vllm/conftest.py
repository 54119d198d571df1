"""These tests import vLLM; where it is not installed they are not even collected."""

from importlib.util import find_spec

try:
    # Not "vllm": this folder would be found under that name.
    _here = find_spec("vllm.v1") is not None
except ModuleNotFoundError:
    _here = False

collect_ignore_glob = [] if _here else ["test_*.py"]
