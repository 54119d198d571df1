"""The numpy decoder's network in JAX, its heads sharded over devices. Needs the extra `jax`."""

from kvstrata_adapters.engines.jax_decoder.engine import JaxEngine
from kvstrata_adapters.engines.jax_decoder.model import JaxModel

__all__ = ["JaxEngine", "JaxModel"]
