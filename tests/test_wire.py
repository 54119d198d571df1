from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata import wire
from kvstrata.errors import Malformed
from kvstrata.testing.chunks import a_namespace

ints = st.integers(-(2**63), 2**63 - 1)
TO_NODE = (wire.Hello, wire.Step, wire.Status, wire.Drop)
FROM_NODE = (
    wire.Welcome,
    wire.StepReply,
    wire.Resolved,
    wire.StatusReply,
    wire.Dropped,
    wire.Failure,
)

st.register_type_strategy(int, ints)
st.register_type_strategy(float, st.floats(allow_nan=False))
st.register_type_strategy(type(a_namespace()), st.just(a_namespace()))


def message(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Every field of a struct, from its annotation."""
    return st.builds(cls, **{f.name: st.from_type(f.type) for f in msgspec.structs.fields(cls)})


for part in (wire.Lookup, wire.Use, wire.Found, wire.Credits, wire.TierStatus):
    st.register_type_strategy(part, message(part))


@given(st.one_of([message(cls) for cls in TO_NODE]))
def test_messages_to_a_node_round_trip(sent: Any) -> None:
    received = wire.decode_to_node(wire.encode(sent))
    assert received == sent
    assert type(received) is type(sent)


@given(st.one_of([message(cls) for cls in FROM_NODE]))
def test_messages_from_a_node_round_trip(sent: Any) -> None:
    received = wire.decode_from_node(memoryview(wire.encode(sent)))
    assert received == sent
    assert type(received) is type(sent)


@given(st.binary(max_size=300))
def test_random_bytes_are_malformed(raw: bytes) -> None:
    for decode in (wire.decode_to_node, wire.decode_from_node):
        with pytest.raises(Malformed, match="message"):
            decode(raw)


@given(st.one_of([message(cls) for cls in TO_NODE]), st.data())
def test_damaged_messages_are_malformed_or_well_formed(sent: Any, data: st.DataObject) -> None:
    raw = bytearray(wire.encode(sent))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        with contextlib.suppress(Malformed):
            assert isinstance(wire.decode_to_node(damaged), TO_NODE)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_other_msgpack_is_malformed(value: Any) -> None:
    raw = msgspec.msgpack.encode(value)
    with pytest.raises(Malformed):
        wire.decode_to_node(raw)
    with pytest.raises(Malformed):
        wire.decode_from_node(raw)


def test_each_side_takes_its_own_messages_only() -> None:
    with pytest.raises(Malformed):
        wire.decode_from_node(wire.encode(wire.Status(1)))
    with pytest.raises(Malformed):
        wire.decode_to_node(wire.encode(wire.Failure(1, "busy", "later")))


@pytest.mark.parametrize("end", [b"", b"\xc0"])
@pytest.mark.parametrize("nest", [b"\x91", b"\x81\x01"])
def test_deep_nesting_is_malformed(nest: bytes, end: bytes) -> None:
    """In a field of a later version, which is skipped unread."""
    for tag, decode in ((b"status", wire.decode_to_node), (b"stepped", wire.decode_from_node)):
        raw = bytes([0x9F, 0xA0 + len(tag)]) + tag + b"\x01" + 12 * b"\x90" + nest * 100_000 + end
        with pytest.raises(Malformed):
            decode(raw)


def test_fields_of_a_later_version_are_ignored() -> None:
    raw = b"\x93\xa6status\x07\xa5newer"
    assert wire.decode_to_node(raw) == wire.Status(7)


def test_an_empty_step_is_small() -> None:
    """One goes out with every step of a scheduler."""
    assert len(wire.encode(wire.Step(1))) < 24
