"""How schemathesis writes bodies as msgpack: by the document, and what it says in words."""

from typing import Any

import msgspec
import schemathesis
from schemathesis.transport.serialization import Binary


def _packable(value: Any) -> Any:
    if isinstance(value, Binary):
        return value.data
    if isinstance(value, dict):
        return _with_lengths({name: _packable(part) for name, part in value.items()})
    if isinstance(value, list):
        return [_packable(part) for part in value]
    return value


def _with_lengths(part: dict[str, Any]) -> dict[str, Any]:
    """Of a run of keys, whose namespace has 16 bytes, and whose hashes have `size` each; and of
    token ids, which have four."""
    size, hashes, namespace = (part.get(name) for name in ("size", "hashes", "namespace"))
    if isinstance(namespace, bytes):
        part["namespace"] = namespace[:16].ljust(16, b"\0")
    if isinstance(hashes, bytes) and isinstance(size, int) and size > 0:
        part["hashes"] = hashes[: len(hashes) // size * size]
    tokens = part.get("token_ids")
    if isinstance(tokens, bytes):
        part["token_ids"] = tokens[: len(tokens) // 4 * 4] or b"\1\0\0\0"
    return part


@schemathesis.serializer("application/msgpack")
def pack(context: Any, value: Any) -> bytes:
    """Text may be an example of the document, which shows the body in hexadecimal."""
    try:
        return (
            bytes.fromhex(value) if type(value) is str else msgspec.msgpack.encode(_packable(value))
        )
    except ValueError:
        return msgspec.msgpack.encode(value)
    except OverflowError:
        return b"\xc1"  # a number that msgpack can't say, nor may this byte begin anything
