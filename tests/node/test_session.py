"""Steps of a session, without sockets: refused as a whole, or done."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from kvstrata import wire
from kvstrata.config import HostSettings
from kvstrata.errors import Malformed
from kvstrata.keys import Key, Namespace
from kvstrata.node.namespaces import Namespaces
from kvstrata.node.session import Session
from kvstrata.node.store import Store
from kvstrata.testing.chunks import a_namespace

PAGE = 4096
NAMESPACE = a_namespace(PAGE)


def key(n: int) -> Key:
    return NAMESPACE.key(0, n.to_bytes(4, "big"))


def begun(tmp_path: Path, namespace: Namespace = NAMESPACE) -> Session:
    namespaces = Namespaces()
    namespaces.add(namespace)
    settings = HostSettings(shm_dir=tmp_path)
    store = Store(memoryview(bytearray(16 * PAGE)), settings, namespaces, time.monotonic)
    session = Session(b"id", "session:1", store, lambda session, message: None)
    session.begin(wire.Hello(wire.PROTOCOL, "engine", "worker", namespace), namespace)
    return session


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (wire.Step(0, commits=[b"short"]), "a key has 21 to 52 bytes"),
        (wire.Step(0, commits=[b"n" * 36]), "not of this session's namespace"),
        (wire.Step(0, reserves=[NAMESPACE.key(5, b"h")]), "not of this session's namespace"),
        (wire.Step(0, credits={5: 1}), "by group of this session's namespace"),
        (wire.Step(0, credits={0: -1}), "by group of this session's namespace"),
        (wire.Step(0, renews=[1] * 70_000), "at most 65536 leases"),
        (wire.Step(0, lookups=[wire.Lookup(i, []) for i in range(70_000)]), "at most 65536 leases"),
        (wire.Step(0, begin=[(1, [])] * 70_000), "at most 65536 leases"),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_whole(
    tmp_path: Path, step: wire.Step, message: str
) -> None:
    session = begun(tmp_path)
    step = msgspec.structs.replace(step, reserves=[*step.reserves, key(1)])
    with pytest.raises(Malformed, match=message):
        session.step(step)
    # Key 1 was not reserved, and the session stands.
    assert session.step(wire.Step(1, reserves=[key(2)])).reserved == [0]


def test_a_slot_is_used_for_chunks_of_its_size_only(tmp_path: Path) -> None:
    """Readers go by the size of the key: from a smaller slot they would read its neighbour."""
    group = NAMESPACE.groups[0]
    wider = msgspec.structs.replace(group, id=1, layers=("2", "3", "4", "5"))
    both = msgspec.structs.replace(NAMESPACE, groups=(group, wider))
    session = begun(tmp_path, both)
    (granted,) = session.step(wire.Step(0, credits={0: 1})).credits
    small = granted.offsets[0]
    with pytest.raises(Malformed, match=f"slot {small} has 4096 bytes"):
        session.step(wire.Step(0, uses=[wire.Use(small, both.key(1, b"h"))]))
    assert session.step(wire.Step(0, uses=[wire.Use(small, both.key(0, b"h"))])).used == [1]
