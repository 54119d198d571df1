"""The examples of the published document: each operation has them, and they are true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from server_kit import database_url

from kvstrata.config import ServerSettings
from kvstrata_server import openapi
from kvstrata_server.app import create_app

JSON = "application/json"


@pytest.fixture(scope="module")
def document(tmp_path_factory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("document")
    return openapi.document(create_app(ServerSettings(database=database_url(path))))


def operations(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for found in document["paths"].values():
        yield from found.values()


def main_answer(operation: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """Status, media type and entry of what an operation answers if all is well: a dry run's 200
    stands beside the 202 of what is really done."""
    status = max(s for s in operation["responses"] if s.startswith("2"))
    [(kind, entry)] = operation["responses"][status]["content"].items()
    return int(status), kind, entry


def validator(document: dict[str, Any], schema: dict[str, Any]) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


def examples(entry: dict[str, Any]) -> list[Any]:
    """Of a media type or a parameter: one, or several with names."""
    if "example" in entry:
        return [entry["example"]]
    return [each["value"] for each in entry.get("examples", {}).values()]


def test_every_operation_shows_what_is_sent_and_answered(document):
    lacking = []
    for operation in operations(document):
        name = operation["operationId"]
        for kind, entry in operation.get("requestBody", {"content": {}})["content"].items():
            if not examples(entry):
                lacking.append(f"{name}: its request as {kind}")
        if not examples(main_answer(operation)[2]):
            lacking.append(f"{name}: its answer")
    assert not lacking, "add to kvstrata_server/examples, and `example(...)` to the route"


def test_examples_follow_their_schemas(document):
    for operation in operations(document):
        bodies = operation.get("requestBody", {"content": {}})["content"]
        kinds = [(k, e) for a in operation["responses"].values()
                 for k, e in a.get("content", {}).items()]  # fmt: skip
        for kind, entry in [*bodies.items(), *kinds]:
            if kind == JSON:
                for shown in examples(entry):
                    validator(document, entry["schema"]).validate(shown)
        for parameter in operation.get("parameters", []):
            for shown in parameter["schema"].get("examples", []):
                validator(document, parameter["schema"]).validate(shown)
