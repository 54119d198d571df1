"""A tier around a tier.

A wrapper takes part in every call of the tier within it and is a tier itself, so that wrappers
compose: settings list them from the innermost to the outermost, as in
`wrap = [{type = "encrypted", ...}, {type = "compressed"}, {type = "metered"}]`. Compress outside
of encryption (ciphertext does not compress), meter outside of all.

A wrapper is loaded by its name in the entry-point group `kvstrata.wrappers`, or as
`module:Class`, and made with `wrap`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Self

from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, ValidationError

from kvstrata.config import what_is_wrong
from kvstrata.errors import ConfigError
from kvstrata.keys import Key
from kvstrata.tiers.base import Item, Outcome, Tier, TierContext, Usage

__all__ = ["Wrapper", "WrapperOptions", "extra_module"]


class WrapperOptions(BaseModel):
    """Options of a wrapper; subclass it."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def parse(cls, wrapper: str, options: dict[str, Any]) -> Self:
        """Raises `ConfigError`, naming every option that is wrong."""
        try:
            return cls.model_validate(options)
        except ValidationError as e:
            raise ConfigError(f"wrapper {wrapper}: {what_is_wrong(e)}") from e


class Wrapper(Tier):
    """Forwards everything to `inner`; subclass it and override what the wrapper is about.

    Its name, store id and capacity are those of the tier within: the index and the metrics see
    one tier. Wrapping changes what the objects of a store are, so all nodes of a shared store
    wrap it alike.
    """

    def __init__(self, inner: Tier) -> None:
        """Use `wrap`."""
        self.inner = inner

    @classmethod
    @abstractmethod
    def wrap(cls, inner: Tier, options: dict[str, Any], context: TierContext) -> Tier:
        """Put it around an open tier. Raises `ConfigError` on options that cannot work, saying
        what to change; `inner` is left as it was."""

    @classmethod
    async def open(cls, options: dict[str, Any], context: TierContext) -> Tier:
        """A wrapper is no tier of its own. Raises `ConfigError`."""
        raise ConfigError(f"{cls.__name__} goes around a tier: name it in that tier's `wrap`")

    @property
    def name(self) -> str:
        return self.inner.name

    @name.setter
    def name(self, name: str) -> None:
        self.inner.name = name

    @property
    def store_id(self) -> str:  # type: ignore[override]
        return self.inner.store_id

    @property
    def writable(self) -> bool:  # type: ignore[override]
        return self.inner.writable

    def collectors(self) -> list[Collector]:
        """Prometheus collectors of this wrapper and of those within it; see `metered`."""
        return self.inner.collectors() if isinstance(self.inner, Wrapper) else []

    async def lookup(self, keys: Sequence[Key], deadline: float | None = None) -> list[bool]:
        return await self.inner.lookup(keys, deadline)

    async def store(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        return await self.inner.store(batch, deadline)

    async def load(self, batch: Sequence[Item], deadline: float | None = None) -> list[Outcome]:
        return await self.inner.load(batch, deadline)

    async def evict(self, keys: Sequence[Key]) -> list[bool]:
        return await self.inner.evict(keys)

    def keys(self) -> list[Key]:
        return self.inner.keys()

    def usage(self) -> Usage:
        return self.inner.usage()

    async def drain(self, deadline: float | None = None) -> None:
        await self.inner.drain(deadline)

    async def close(self) -> None:
        await self.inner.close()


def extra_module(name: str, extra: str, wrapper: str) -> Any:
    """A module that comes with an extra of ours. Raises `ConfigError` saying what to install."""
    try:
        return import_module(name)
    except ImportError as e:
        raise ConfigError(
            f"wrapper {wrapper} needs {name.split('.')[0]} ({e}): pip install 'kvstrata[{extra}]'"
        ) from e
