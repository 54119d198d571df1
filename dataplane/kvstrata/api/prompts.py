"""Prompts as token ids, which the server hashes as engines do."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag

from kvstrata.api.base import Request

__all__ = ["MAX_TOKENS", "ModelTokens", "NamespaceTokens", "Prompt", "told_by"]

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


def told_by(name: str, yes: str, no: str) -> Discriminator:
    """Tells two messages apart by a field that one of them has. Errors are about that one."""

    def tag(value: Any) -> str:
        fields = type(value).model_fields if isinstance(value, BaseModel) else value
        return yes if isinstance(fields, dict) and name in fields else no

    return Discriminator(tag)


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
    Annotated[ModelTokens, Tag("model")] | Annotated[NamespaceTokens, Tag("namespace")],
    told_by("model", "model", "namespace"),
]
