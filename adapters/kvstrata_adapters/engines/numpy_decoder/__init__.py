"""A real, small engine that needs nothing but numpy: for the demo, tests and examples."""

from kvstrata_adapters.engines.numpy_decoder.engine import NumpyEngine
from kvstrata_adapters.engines.numpy_decoder.model import DecoderConfig, DecoderModel
from kvstrata_adapters.engines.numpy_decoder.paged import GenerateResult

__all__ = ["DecoderConfig", "DecoderModel", "GenerateResult", "NumpyEngine"]
