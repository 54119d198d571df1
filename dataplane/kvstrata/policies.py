"""Which chunk the host tier gives up first.

A policy orders keys; it owns no memory and knows nothing of leases. The host tier walks
`victims()` and skips what is leased or busy. Out-of-tree policies load as `module:Class`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib import import_module

from kvstrata.errors import ConfigError
from kvstrata.keys import Key

__all__ = ["Lru", "Policy", "open_policy"]


class Policy(ABC):
    """An order of eviction over the keys inserted and not removed.

    Batches are chains in prefix order. The tail of a chain goes before its head, because a
    prefix without its start can't be hit: batches are ranked so that the head is youngest.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the region's size in bytes."""
        self.capacity = capacity

    @abstractmethod
    def insert(self, keys: Sequence[Key], nbytes: int) -> None:
        """Chunks of `nbytes` each became readable."""

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """They were used (found and leased), not merely probed. Unknown keys are ignored."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """It is gone. Unknown keys are ignored."""

    @abstractmethod
    def victims(self) -> Iterator[Key]:
        """Keys, first to give up first. Not modified while a caller iterates."""


class Lru(Policy):
    """Least recently used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, keys: Sequence[Key], nbytes: int) -> None:
        for key in reversed(keys):
            self._order[key] = None
            self._order.move_to_end(key)

    def touch(self, keys: Sequence[Key]) -> None:
        order = self._order
        for key in reversed(keys):
            if key in order:
                order.move_to_end(key)

    def remove(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self) -> Iterator[Key]:
        return iter(self._order)


_BUILT_IN: dict[str, type[Policy]] = {"lru": Lru}


def open_policy(name: str, capacity: int) -> Policy:
    """A built-in policy by name or an own one by `module:Class`. Raises `ConfigError`."""
    found = _BUILT_IN.get(name)
    if found is None:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as e:
            raise ConfigError(
                f"host.policy {name!r} is neither one of {sorted(_BUILT_IN)} nor module:Class: {e}"
            ) from e
        if not (isinstance(found, type) and issubclass(found, Policy)):
            raise ConfigError(f"host.policy {name!r} is not a kvstrata.policies.Policy")
    return found(capacity)
