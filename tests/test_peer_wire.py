import hashlib
import hmac

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata import peer_wire as wire
from kvstrata.errors import ConfigError, Malformed

HELLO = wire.Hello(1, "near", "i1", b"c" * 32)
CHALLENGE = wire.Challenge(b"s" * 32)

messages = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ).map(msgspec.msgpack.encode),
    st.tuples(
        st.sampled_from(["hello", "acquire", "probe", "granted", "welcome", "failure"]),
        st.lists(st.integers() | st.text(max_size=9) | st.lists(st.binary(max_size=60))),
    ).map(lambda m: encode_or_nothing([m[0], *m[1]])),
)


def encode_or_nothing(message):
    try:
        return msgspec.msgpack.encode(message)
    except OverflowError:
        return b""


@settings(deadline=None)
@given(messages)
def test_any_bytes_are_a_message_or_malformed(raw):
    for decode in (wire.decode_to_source, wire.decode_from_source):
        try:
            message = decode(raw)
        except Malformed:
            continue
        assert isinstance(message, msgspec.Struct)


def test_deep_nesting_is_malformed():
    with pytest.raises(Malformed):
        wire.decode_to_source(b"\x91" * 100_000)


@pytest.mark.parametrize(
    "message",
    [
        HELLO,
        wire.Prove(b"p" * 32),
        wire.Open(1, b"{}"),
        wire.Acquire(2, [b"k" * 30], 1.0, 0.5),
        wire.Release(b"l" * 16),
        wire.Probe(3, []),
        wire.Bye(),
    ],
)
def test_to_source_round_trip(message):
    assert wire.decode_to_source(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        CHALLENGE,
        wire.Welcome("far", "i2", {"tcp": b"x"}, b"p" * 32),
        wire.Opened(1, True),
        wire.Granted(2, b"l" * 16, 3.0, [None, wire.ChunkAt(0, 1, 2**64 - 1)]),
        wire.Probed(3, [True, False]),
        wire.Beat(),
        wire.Failure(4, "busy", "later"),
    ],
)
def test_from_source_round_trip(message):
    assert wire.decode_from_source(wire.encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        wire.Hello(1, "a b", "i", b"c" * 32),
        wire.Hello(1, "", "i", b"c" * 32),
        wire.Hello(1, "n" * 129, "i", b"c" * 32),
        wire.Hello(1, "n", "i\n", b"c" * 32),
        wire.Hello(1, "n", "i", b"c" * 31),
        wire.Prove(b"p" * 33),
        wire.Acquire(1, [b""] * (wire.MAX_KEYS + 1), 1.0, 1.0),
        wire.Acquire(1, [], -1.0, 1.0),
        wire.Acquire(1, [], 1.0, float("nan")),
        wire.Acquire(1, [], 1.0, float("inf")),
        wire.Release(b""),
    ],
)
def test_out_of_bounds_is_malformed(message):
    with pytest.raises(Malformed):
        wire.decode_to_source(wire.encode(message))


# ---------------------------------------------------------------- proofs


def test_the_proof_is_the_documented_one():
    said = msgspec.msgpack.encode([b"consumer", 1, b"c" * 32, b"s" * 32, "near", "i1", []])
    expected = hmac.new(b"secret", said, hashlib.sha256).digest()
    assert wire.consumer_proof("secret", HELLO, CHALLENGE) == expected


def test_proofs_differ_by_everything_they_are_about():
    def source(secret="secret", hello=HELLO, challenge=CHALLENGE, node="far", told=b"x"):
        return wire.source_proof(secret, hello, challenge, node, "i2", {"tcp": told})

    proofs = [
        wire.consumer_proof("secret", HELLO, CHALLENGE),
        wire.source_proof("secret", HELLO, CHALLENGE, "near", "i1", {}),
        source(),
        source(secret="other"),
        source(hello=wire.Hello(1, "near", "i1", b"d" * 32)),
        source(challenge=wire.Challenge(b"t" * 32)),
        source(node="elsewhere"),
        source(told=b"y"),
    ]
    assert len(set(proofs)) == len(proofs)


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback", "wildcard"),
    [
        ("tcp://127.0.0.1:0", "127.0.0.1", 0, True, False),
        ("tcp://localhost:7801", "localhost", 7801, True, False),
        ("tcp://[::1]:7801", "::1", 7801, True, False),
        ("tcp://10.0.0.7:7801", "10.0.0.7", 7801, False, False),
        ("tcp://node-7.example:65535", "node-7.example", 65_535, False, False),
        ("tcp://0.0.0.0:1", "0.0.0.0", 1, False, True),
        ("tcp://*:1", "*", 1, False, True),
        ("tcp://[::]:1", "::", 1, False, True),
    ],
)
def test_addresses(text, host, port, loopback, wildcard):
    address = wire.parse_address(text)
    assert (address.host, address.port) == (host, port)
    assert (address.loopback, address.wildcard) == (loopback, wildcard)
    assert address.url == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:7801",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:65536",
        "tcp://a b:1",
        "tcp://h:1;tcp://g:2",
        "tcp://h:1\n",
        "ipc:///etc/passwd",
        "inproc://x",
        "tcp://user@h:1",
        "tcp://" + "h" * 300 + ":1",
    ],
)
def test_what_is_no_address(text):
    with pytest.raises(ConfigError, match="tcp://host:port"):
        wire.parse_address(text)
