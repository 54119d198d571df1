"""Messages between two nodes: msgpack over ZMQ on TCP, DEALER (consumer) to ROUTER (source).

    consumer                                   source
    Hello(node, incarnation, nonce) ─────────▶
                                    ◀───────── Challenge(nonce)
    Prove(proof) ────────────────────────────▶
                                    ◀───────── Welcome(node, incarnation, transports, proof)
    Open(namespace) · Acquire(keys) · Probe ─▶
                                    ◀───────── Opened · Granted(lease, chunks) · Probed
    Release(lease) ──────────────────────────▶

A proof is HMAC-SHA256 under the cluster's shared secret over both nonces and all that the
prover said. Nonces are fresh on both sides, so nothing can be replayed, and the consumer's
proof can't be turned into a source's. The secret never travels. What follows the handshake is
neither signed nor encrypted: it keeps strangers out, not someone who can rewrite the traffic.

Sequences are parallel: `chunks[i]` belongs to `keys[i]`. Offsets are byte offsets in the
source's region. Durations are seconds. A message is at most `MAX_MESSAGE_BYTES`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvstrata.addresses import is_loopback
from kvstrata.errors import ConfigError, Malformed

__all__ = [
    "HEARTBEAT_SECONDS",
    "MAX_KEYS",
    "MAX_MESSAGE_BYTES",
    "MAX_OUTSTANDING",
    "PROTOCOL",
    "Acquire",
    "Address",
    "Beat",
    "Bye",
    "Challenge",
    "ChunkAt",
    "Failure",
    "FromSource",
    "Granted",
    "Hello",
    "Open",
    "Opened",
    "Probe",
    "Probed",
    "Prove",
    "Release",
    "ToSource",
    "Welcome",
    "consumer_proof",
    "decode_from_source",
    "decode_to_source",
    "encode",
    "parse_address",
    "source_proof",
]

PROTOCOL = 1
MAX_KEYS = 4096
MAX_MESSAGE_BYTES = 1 << 20
# A source takes this many requests of one consumer at a time; ours sends half as many, so that
# those it gave up and the source still works on don't turn the next ones away.
MAX_OUTSTANDING = 32
NONCE_BYTES = 32

# A source or consumer that died without a word is noticed after three of these.
HEARTBEAT_SECONDS = 1.0

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,128}\Z")]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, Meta(min_length=32, max_length=32)]
Lease = Annotated[bytes, Meta(min_length=16, max_length=16)]
Keys = Annotated[list[bytes], Meta(max_length=MAX_KEYS)]
Duration = Annotated[float, Meta(ge=0, le=86_400)]
Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    pass


# ---------------------------------------------------------------- consumer to source


class Hello(_Message, frozen=True, array_like=True, tag="hello"):
    protocol: int
    node: Name
    incarnation: Name
    nonce: Nonce


class Prove(_Message, frozen=True, array_like=True, tag="prove"):
    proof: Proof


class Open(_Message, frozen=True, array_like=True, tag="open"):
    """Announces the namespace that later keys belong to, as its canonical JSON document."""

    id: int
    document: bytes


class Acquire(_Message, frozen=True, array_like=True, tag="acquire"):
    """Lease chunks for `ttl`; the source may spend up to `wait` to bring them into its region."""

    id: int
    keys: Keys
    ttl: Duration
    wait: Duration


class Release(_Message, frozen=True, array_like=True, tag="release"):
    """The lease is no longer needed. Has no answer."""

    lease: Lease


class Probe(_Message, frozen=True, array_like=True, tag="probe"):
    """Which of the keys are here. Renews nothing, promotes nothing."""

    id: int
    keys: Keys


class Bye(_Message, frozen=True, array_like=True, tag="bye"):
    """The session ends, and its leases with it."""


ToSource = Hello | Prove | Open | Acquire | Release | Probe | Bye


# ---------------------------------------------------------------- source to consumer


class Challenge(_Message, frozen=True, array_like=True, tag="challenge"):
    nonce: Nonce


class Welcome(_Message, frozen=True, array_like=True, tag="welcome"):
    """`transports`: by name, what the consumer's `pull` needs (`Transport.describe`)."""

    node: Name
    incarnation: Name
    transports: dict[str, bytes]
    proof: Proof


class Opened(_Message, frozen=True, array_like=True, tag="opened"):
    """`known`: the source has this namespace. If not, it has none of its chunks."""

    id: int
    known: bool


class ChunkAt(_Message, frozen=True, array_like=True):
    """Where a leased chunk lies, and the xxh3-64 of its bytes."""

    offset: Offset
    nbytes: Offset
    checksum: Annotated[int, Meta(ge=0)]


class Granted(_Message, frozen=True, array_like=True, tag="granted"):
    """`chunks[i]` is None where the source does not have the key."""

    id: int
    lease: Lease
    ttl: Duration
    chunks: Annotated[list[ChunkAt | None], Meta(max_length=MAX_KEYS)]


class Probed(_Message, frozen=True, array_like=True, tag="probed"):
    id: int
    here: Annotated[list[bool], Meta(max_length=MAX_KEYS)]


class Beat(_Message, frozen=True, array_like=True, tag="beat"):
    """Sent now and then: sending is how the source notices that a consumer has gone."""


class Failure(_Message, frozen=True, array_like=True, tag="failure"):
    """The request `id` (-1: the session) was refused; see `errors.from_code`.

    `field` is set for `namespace_mismatch`.
    """

    id: int
    code: str
    message: str
    field: str = ""


FromSource = Challenge | Welcome | Opened | Granted | Probed | Beat | Failure

_encoder = msgspec.msgpack.Encoder()
_to_source = msgspec.msgpack.Decoder(ToSource)
_from_source = msgspec.msgpack.Decoder(FromSource)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def decode_to_source(raw: bytes) -> ToSource:
    """A consumer's message. Raises `Malformed`."""
    try:
        message: ToSource = _to_source.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise Malformed(f"message to a source: {e}") from e
    return message


def decode_from_source(raw: bytes) -> FromSource:
    """A source's message. Raises `Malformed`."""
    try:
        message: FromSource = _from_source.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as e:
        raise Malformed(f"message from a source: {e}") from e
    return message


# ---------------------------------------------------------------- who speaks


def consumer_proof(secret: str, hello: Hello, challenge: Challenge) -> bytes:
    """That the consumer named in `hello` knows the secret."""
    return _proof(
        secret, b"consumer", hello.nonce, challenge.nonce, hello.node, hello.incarnation, {}
    )


def source_proof(
    secret: str,
    hello: Hello,
    challenge: Challenge,
    node: str,
    incarnation: str,
    transports: dict[str, bytes],
) -> bytes:
    """That the source knows the secret, is `node`, and is reached by these transports."""
    return _proof(secret, b"source", hello.nonce, challenge.nonce, node, incarnation, transports)


def _proof(
    secret: str,
    role: bytes,
    consumer_nonce: bytes,
    source_nonce: bytes,
    node: str,
    incarnation: str,
    transports: dict[str, bytes],
) -> bytes:
    # One msgpack array: no two different inputs have the same encoding.
    said = (
        role,
        PROTOCOL,
        consumer_nonce,
        source_nonce,
        node,
        incarnation,
        list(transports.items()),
    )
    return hmac.digest(secret.encode(), _encoder.encode(said), hashlib.sha256)


class Address(NamedTuple):
    """Of a peer port. `host` is a name or a bare IP address."""

    host: str
    port: int

    @property
    def url(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self}"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def wildcard(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return self.host == "*"


_ADDRESS = re.compile(r"tcp://(?:\[([0-9A-Fa-f:.%]{2,60})\]|([A-Za-z0-9._*-]{1,253})):([0-9]{1,5})")


def parse_address(text: str) -> Address:
    """`tcp://host:port`, and nothing else that ZMQ would dial. Raises `ConfigError`."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65_535:
        raise ConfigError(f"peer address {text[:200]!r}: write tcp://host:port")
    return Address(match[1] or match[2], int(match[3]))
