"""kvstrata for vLLM. The names that vLLM asks this package for are imported when it asks: they
need vLLM itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvstrata_adapters.engines.vllm.tier import KVStrataTier

__all__ = ["KVStrataTier"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from kvstrata_adapters.engines.vllm import tier

        return getattr(tier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
