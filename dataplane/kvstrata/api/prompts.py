"""Prompts as token ids, which the server hashes as engines do."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from kvstrata.api.base import Request

__all__ = ["MAX_TOKENS", "ModelTokens", "NamespaceTokens", "Prompt", "having", "is_tag", "told_by"]

MAX_TOKENS = 1 << 18
"""Most token ids in one message of JSON. As msgpack (`kvstrata.bulk`) four times as many travel."""


def _numbers(value: Any) -> Any:
    """Of a whole list at once: a prompt may have many."""
    if isinstance(value, list) and not {*map(type, value)} <= {int, float}:
        raise ValueError("numbers are wanted, and not text or truth values")
    return value


_TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 32)]],
    Field(min_length=1, max_length=MAX_TOKENS),
    BeforeValidator(_numbers),
]
_Text = Annotated[str, Field(max_length=512)]


def having(field: str) -> Tag:
    """Of one of several messages: the field that only it has, and must have."""
    return Tag(f"having `{field}`")


def is_tag(part: Any) -> bool:
    """Whether this part of the place of an error is no field but `having` one."""
    return isinstance(part, str) and part.startswith("having `")


def told_by(*fields: str) -> Discriminator:
    """Tells messages apart by the field that each is tagged as `having`. Errors are about that
    one; of what has none of the fields, that it needs one."""

    def tag(value: Any) -> str | None:
        given = type(value).model_fields if isinstance(value, BaseModel) else value
        if not isinstance(given, dict):
            return None
        return next((having(field).tag for field in fields if field in given), None)

    *others, last = (f"`{field}`" for field in fields)
    return Discriminator(
        tag,
        custom_error_type="no_choice",
        custom_error_message=f"an object is wanted that has {', '.join(others)} or {last}",
    )


class _Tokens(Request):
    """A prompt from its first token on; what comes after its last whole chunk counts for nothing.

    `lora` and `cache_salt` are what its request says, as far as they go into hashes.
    """

    token_ids: _TokenIds
    lora: _Text = ""
    cache_salt: _Text = ""


class NamespaceTokens(_Tokens):
    """Token ids that the server hashes as engines of a namespace do, named by its digest."""

    namespace: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class ModelTokens(_Tokens):
    """Token ids that the server hashes as engines of a model do.

    Of several revisions, and of several namespaces (by dtype, chunk size and the like), each
    counts by itself. `tenant`: of those with this tenant salt; empty: of those without one.
    """

    model: Annotated[str, Field(min_length=1, max_length=512)]
    revision: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    tenant: _Text = ""


Prompt = Annotated[
    Annotated[ModelTokens, having("model")] | Annotated[NamespaceTokens, having("namespace")],
    told_by("model", "namespace"),
]
