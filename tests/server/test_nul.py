"""NUL in a request's text, which PostgreSQL takes nowhere: refused, wherever it stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from fastapi.openapi.utils import get_openapi
from server_kit import NAMESPACE, Running, host, join, keys, report, running
from sqlalchemy import text

from kvstrata import api
from kvstrata.api.base import Request

# Said in whatever words, and made printable; documents, which are checked as what they are.
FREE = {"detail", "namespaces"}
# Prompts: nothing of them is written anywhere, and engines put what they like into salts.
PROMPTS = {"_Tokens", "ModelTokens", "NamespaceTokens"}


def parameters(r: Running) -> Iterator[tuple[str, str, str, str]]:
    """Method, path with NUL for what it names, and query; what should be answered is the last."""
    paths: dict[str, dict[str, Any]] = get_openapi(
        title="", version="", routes=r.app.router.routes
    )["paths"]
    for path, operations in paths.items():
        for method, operation in operations.items():
            if "{" in path:
                yield method, path.replace("{", "a%00").replace("}", ""), "", "404"
            for parameter in operation.get("parameters", ()):
                if parameter["in"] == "query":
                    yield method, path, f"?{parameter['name']}=a%00b", "422"


async def test_paths_and_parameters(postgres_address: str) -> None:
    async with running(postgres_address) as r:
        tried = 0
        for method, path, query, wanted in parameters(r):
            answer = await r.http.request(method, path + query)
            assert (str(answer.status_code), method, path) == (wanted, method, path)
            api.Problem.model_validate_json(answer.content)
            tried += 1
        assert tried > 25


async def test_headers(postgres_address: str) -> None:
    async with running(postgres_address) as r:
        await join(r.control, "a")
        asked = {"node": "a", "keys": keys(1), "deadline": 5}
        named = {"Idempotency-Key": b"a\0b"}
        answer = await r.http.post("/v1/prefetches", json=asked, headers=named)
        assert answer.status_code == 422


REGISTRATION = {"id": "n", "incarnation": "i", "transports": [], "capacity_bytes": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/nodes", REGISTRATION | {"peer_address": "tcp://a\0:1"}),
        ("/v1/nodes", REGISTRATION | {"stores": [{"id": "s", "tier": "f\0s"}]}),
        ("/v1/nodes", REGISTRATION | {"events": [{"endpoint": "tcp://\0:1"}]}),
        ("/v1/nodes", REGISTRATION | {"transports": ["t\0"]}),
        ("/v1/evictions", {"chunks": {"model": "m\0"}}),
        ("/v1/evictions", {"chunks": {"model": "m", "revision": "\0"}}),
        ("/v1/prefetches", {"node": "a\0", "keys": keys(1)}),
        ("/v1/transfers", {"source": "a\0", "target": "a", "keys": keys(1)}),
    ],
)
async def test_bodies(postgres_address: str, path: str, body: dict[str, Any]) -> None:
    async with running(postgres_address) as r:
        answer = await r.http.post(path, json=body)
        assert answer.status_code == 422, answer.text
        await join(r.control, "well")
        await r.state.writer.flushed(5)
        assert r.state.writer.dropped == 0


async def test_documents_of_namespaces(postgres_address: str) -> None:
    async with running(postgres_address) as r:
        await join(r.control, "a")
        for model, status in (("nu\0l", 422), ("back\\u0000slash", 200)):
            sent = report(0, host(keys(1)), namespaces=(document(model),))
            answer = await r.http.post(
                "/v1/nodes/a/reports", json=json.loads(sent.model_dump_json())
            )
            assert answer.status_code == status, answer.text
        await r.state.writer.flushed(5)
        async with r.state.database.engine.connect() as connection:
            await connection.execute(text("SELECT * FROM placements_by_namespace"))


def document(model: str) -> str:
    return msgspec.structs.replace(NAMESPACE, model=model).document.decode()


def test_what_went_wrong_can_always_be_said() -> None:
    said = api.EvictionResult(incarnation="i", detail="no file b\0c\udce9")
    assert said.detail == "no file b\ufffdc?"
    assert api.EvictionResult.model_validate_json(said.model_dump_json()) == said


def strings(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place for a string, and the name of the field it is in."""
    if isinstance(schema, list):
        for part in schema:
            yield from strings(part, name)
    if isinstance(schema, dict):
        if schema.get("type") == "string":
            yield name, schema
        for key, part in schema.items():
            if key in ("properties", "$defs"):
                for field, inner in part.items():
                    if field not in PROMPTS:
                        yield from strings(inner, field)
            elif key != "examples":
                yield from strings(part, name)


def messages(base: type[Request]) -> Iterator[type[Request]]:
    for each in base.__subclasses__():
        yield each
        yield from messages(each)


@pytest.mark.parametrize(
    "message",
    sorted((m for m in messages(Request) if m.__name__ not in PROMPTS), key=lambda m: m.__name__),
)
def test_every_text_of_a_message_has_a_pattern(message: type[Request]) -> None:
    free = {
        name
        for name, schema in strings(message.model_json_schema())
        if not {"pattern", "enum", "const", "format"} & set(schema)
    }
    assert free <= FREE
