"""A real, small engine that needs nothing but numpy: for the demo, tests and examples."""

from kvstrata_adapters.engines.numpy_decoder.engine import GenerateResult, NumpyEngine
from kvstrata_adapters.engines.numpy_decoder.model import DecoderConfig, DecoderModel

__all__ = ["DecoderConfig", "DecoderModel", "GenerateResult", "NumpyEngine"]
