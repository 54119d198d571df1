"""Namespaces a node knows, and those it forgets."""

from __future__ import annotations

import pytest

from kvstrata.errors import Missing
from kvstrata.node.namespaces import Namespaces
from kvstrata.testing.chunks import a_namespace

SOME = [a_namespace(tenant=str(n)) for n in range(6)]


def test_the_oldest_that_nobody_uses_are_forgotten() -> None:
    known = Namespaces(most=3)
    for namespace in SOME:
        known.add(namespace)
    assert known.crowded
    known.add(SOME[1])  # it is of use once more
    known.prune({SOME[0].digest})
    assert known.all() == [SOME[0], SOME[5], SOME[1]]
    assert not known.crowded
    assert known.size_of(SOME[0].key(0, b"h")) == 4096
    for forgotten in SOME[2:5]:
        assert known.get(forgotten.digest) is None
        with pytest.raises(Missing, match="no namespace"):
            known.size_of(forgotten.key(0, b"h"))


def test_what_is_in_use_stays_however_much_it_is() -> None:
    known = Namespaces(most=3)
    for namespace in SOME:
        known.add(namespace)
    known.prune({namespace.digest for namespace in SOME[:5]})
    assert known.all() == SOME[:5]
    assert not known.crowded  # which costs nothing to ask


def test_one_that_was_forgotten_can_be_brought_again() -> None:
    known = Namespaces(most=1)
    known.add(SOME[0])
    known.add(SOME[1])
    known.prune(())
    known.add(SOME[0])
    assert known.size_of(SOME[0].key(0, b"h")) == 4096
