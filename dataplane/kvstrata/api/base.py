"""What messages are made of: bounds, numbers, keys, and the problem document."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints

from kvstrata import errors
from kvstrata.errors import Malformed
from kvstrata.keys import DIGEST_BYTES, MAX_KEY_BYTES, Key, split_key

__all__ = [
    "HTTP_STATUS",
    "MAX_INT",
    "MAX_KEYS",
    "MAX_WAIT",
    "NO_NUL",
    "NUMBER",
    "Answer",
    "Detail",
    "Flag",
    "HexKey",
    "Keys",
    "Name",
    "Problem",
    "Request",
    "Text",
    "WrongPart",
    "from_hex",
]

MAX_KEYS = 65_536
"""Most keys in one list of one message."""
MAX_INT = 1 << 53
"""Largest number of bytes, chunks or reports in a message: every reader of JSON has it exactly."""
MAX_WAIT = 30.0
"""Longest long poll, seconds."""

# The one table from conditions to HTTP. A 5xx means that asking again may help.
HTTP_STATUS: dict[str, int] = {
    errors.NamespaceMismatch.code: 409,
    errors.Malformed.code: 422,
    errors.Missing.code: 404,
    errors.Corrupt.code: 502,
    errors.Expired.code: 410,
    errors.Busy.code: 503,
    errors.NoSpace.code: 507,
    errors.PeerRefused.code: 403,
    errors.LinkBroken.code: 502,
    errors.ConfigError.code: 500,
}


def from_hex(text: str) -> Key:
    """A key from its hex form. Raises `Malformed`."""
    try:
        raw = bytes.fromhex(text)
    except ValueError as e:
        raise Malformed(f"key is not hexadecimal: {text[:80]!r}") from e
    split_key(raw)
    return Key(raw)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("\0", "\ufffd").encode(errors="replace").decode()
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool | str | bytes):
        raise ValueError("a number is wanted, and not text or a truth value")
    return value


# JSON's types and no others: left to itself, pydantic takes `true` for 1 and "yes" for `true`. It
# stands after the bounds, or the published document would not show those.
NUMBER = BeforeValidator(_number)
Flag = Annotated[bool, Strict()]

# A pattern rather than a Python validator: 65,536 keys take 25 ms instead of 80 on the event
# loop of the server, and the published document states it. 21 bytes: digest, group, 1 of hash.
HexKey = Annotated[
    str,
    StringConstraints(
        to_lower=True, pattern=f"^(?:[0-9a-fA-F]{{2}}){{{DIGEST_BYTES + 5},{MAX_KEY_BYTES}}}$"
    ),
]
Name = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
# What databases take as text: PostgreSQL takes no NUL.
NO_NUL = r"^[^\x00]*$"
Text = Annotated[str, StringConstraints(pattern=NO_NUL)]
# What went wrong somewhere, in whatever words: it must be possible to say so.
Detail = Annotated[str, Field(max_length=2000), BeforeValidator(_printable)]
Keys = Annotated[list[HexKey], Field(max_length=MAX_KEYS)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Answer(BaseModel):
    # Fields that may be left out when it is read are there when it is sent, and the document says
    # so: generated clients then need not ask.
    model_config = ConfigDict(
        extra="ignore",
        use_attribute_docstrings=True,
        json_schema_serialization_defaults_required=True,
    )


class WrongPart(Answer):
    """A part of a request that is wrong."""

    loc: list[str | int] = []
    """Where: `body`, `query`, `path` or `header`, then names and positions."""
    msg: str = ""
    type: str = ""


class Problem(Answer):
    """RFC 9457 problem document. `code` is the error's name in `kvstrata.errors`.

    `retryable`: the same request may succeed later. `errors` names the parts of the request
    that are wrong.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    code: str = "error"
    retryable: bool = False
    errors: list[WrongPart] = []
