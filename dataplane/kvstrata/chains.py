"""Which chunk extends which.

A key's hash is chained: it names a chunk together with all before it, so what a chunk extends
never changes. The keys don't show it, but a request that looks a prefix up lists it in order.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from kvstrata.keys import Key, split_key

__all__ = ["Chains"]

# Links of chunks that were asked for and may be stored soon.
_MOST_ABSENT = 65_536


class Chains:
    """What lookups have told about order; chunks it knows nothing of extend nothing."""

    def __init__(self) -> None:
        # Two views of the same links; a child may be absent.
        self._parent: dict[Key, Key] = {}
        self._children: dict[Key, dict[Key, None]] = {}
        self._most = _MOST_ABSENT

    def __len__(self) -> int:
        return len(self._parent)

    def learn(self, keys: Sequence[Key]) -> None:
        """A prefix, or a later part of one, in order."""
        parent = self._parent
        if len(keys) < 2 or split_key(keys[0])[:2] != split_key(keys[-1])[:2]:
            return
        before = keys[0]
        for key in keys[1:]:
            if key not in parent:
                parent[key] = before
                self._children.setdefault(before, {})[key] = None
            before = key

    def parent_of(self, key: Key) -> Key | None:
        """The chunk that this one extends directly, present or not."""
        return self._parent.get(key)

    def extended(self, keys: Sequence[Key], present: Container[Key]) -> list[Key]:
        """Those of the `present` chunks that `keys`, which become readable, extend; of each
        chain from its head on. Keys of one chain stand together, in order."""
        parent = self._parent
        ancestors: dict[Key, None] = {}
        before: Key | None = None
        for key in keys if parent else ():
            above = parent.get(key)
            if above is not None and above != before:
                ancestors |= self._ancestors(above, present, ancestors)
            before = key
        return list(ancestors)

    def before(self, key: Key, present: Container[Key]) -> list[Key]:
        """The `present` chunks that this one extends, from the head on."""
        return list(self._ancestors(self._parent.get(key), present, ()))

    def extensions(self, key: Key, present: Container[Key]) -> list[Key]:
        """The `present` chunks that extend this one directly; links to others are forgotten."""
        children = self._children.get(key)
        if children is None:
            return []
        found = [child for child in children if child in present]
        if len(found) < len(children):
            for child in children.keys() - set(found):
                del self._parent[child], children[child]
            if not children:
                del self._children[key]
        return found

    def may_extend(self, key: Key) -> Iterable[Key]:
        """Keys that may be those of `extensions`, and must not be changed: cheap to ask."""
        return self._children.get(key, ())

    def prune(self, present: Container[Key], count: int) -> None:
        """Forget what is not among the `count` chunks `present`, if that is worth the time."""
        if len(self._parent) <= 2 * count + self._most:
            return
        self._parent = {key: up for key, up in self._parent.items() if key in present}
        self._children = {}
        for key, up in self._parent.items():
            self._children.setdefault(up, {})[key] = None

    def _ancestors(
        self, key: Key | None, present: Container[Key], known: Container[Key]
    ) -> dict[Key, None]:
        up: dict[Key, None] = {}
        # `up` is asked because an engine may have told nonsense, such as a circle.
        while key is not None and key in present and key not in known and key not in up:
            up[key] = None
            key = self._parent.get(key)
        return dict.fromkeys(reversed(up))
