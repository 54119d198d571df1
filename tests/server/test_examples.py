"""The examples of the published document: each operation has them, and they are true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from server_kit import Running, database_url, running

from kvstrata.bulk import MEDIA_TYPE
from kvstrata.config import ServerSettings
from kvstrata_server import openapi
from kvstrata_server.app import create_app
from kvstrata_server.examples.world import SOURCE, TARGET

JSON = "application/json"

# One after the other; what isn't named comes in the place of its method.
ORDER = ["register_node", "post_report", "put_heartbeat", "register_instance", "POST", "PUT",
         "post_progress", "post_eviction_result", "GET", "unregister_instance", "DELETE",
         "deregister_node"]  # fmt: skip
# Done at another node than the one that most examples are about.
ELSEWHERE = {"post_progress": TARGET}
NOT_HERE = {"dump": "it asks the node that the example names, which is at no place"}
# What differs from run to run.
VARIES = {"age", "id", "created", "deadline"}


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
        lacking += [
            f"{name}: {parameter['name']}"
            for parameter in operation.get("parameters", [])
            if parameter["required"] and not parameter["schema"].get("examples")
        ]
        if not examples(main_answer(operation)[2]):
            lacking.append(f"{name}: its answer")
    assert not lacking, "add them to kvstrata_server/examples, and to `Path(...)`"


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


def test_examples_of_schemas_follow_them(document):
    schemas = document["components"]["schemas"]
    assert schemas["Problem"]["examples"]
    for schema in schemas.values():
        for shown in schema.get("examples", []):
            validator(document, schema).validate(shown)


def prepared(shown: Any, node: str = SOURCE, ids: dict[str, str] | None = None) -> Any:
    """An example with the ids that this server gave in place of those shown."""
    text = json.dumps(shown)
    for example, real in (ids or {}).items():
        text = text.replace(f'"{example}"', f'"{real}"')
    return json.loads(text.replace(f'"{SOURCE}"', f'"{node}"'))


async def both_nodes(r: Running, document: dict[str, Any]) -> None:
    """The second one, too, of which no example tells how it came."""
    register = document["paths"]["/v1/nodes"]["post"]
    [body] = examples(register["requestBody"]["content"][JSON])
    other = {**body, "id": TARGET, "stores": [], "events": []}
    assert (await r.http.post("/v1/nodes", json=other)).status_code == 200


async def test_what_is_shown_is_what_happens(tmp_path, document):
    """Each request shown is taken, one after the other, and answered as shown."""
    ids: dict[str, str] = {}
    asked = [
        (path, method.upper(), operation)
        for path, found in document["paths"].items()
        for method, operation in found.items()
        if main_answer(operation)[1] != "text/event-stream"  # it doesn't end
        and operation["operationId"] not in NOT_HERE
    ]

    def place(each: tuple[str, str, dict[str, Any]]) -> int:
        name = each[2]["operationId"]
        return ORDER.index(name if name in ORDER else each[1])

    async with running(tmp_path) as r:
        await both_nodes(r, document)
        for path, method, operation in sorted(asked, key=place):
            name = operation["operationId"]
            status, kind, entry = main_answer(operation)
            node = ELSEWHERE.get(name, SOURCE)
            query = {}
            for parameter in operation.get("parameters", []):
                if parameter["required"]:
                    value = prepared(parameter["schema"]["examples"][0], node, ids)
                    path = path.replace(f"{{{parameter['name']}}}", value)
                    if parameter["in"] == "query":
                        query[parameter["name"]] = value
            body = operation.get("requestBody", {"content": {JSON: {}}})["content"][JSON]
            # The answer shown is that to the first of several requests.
            for each in reversed(examples(body) or [None]):
                sent = {} if each is None else {"json": prepared(each, ids=ids)}
                answer = await r.http.request(method, path, params=query, **sent)
                assert answer.status_code == status, f"{name}: {answer.text}"
            if kind != JSON:
                continue
            found, [shown] = answer.json(), examples(entry)
            validator(document, entry["schema"]).validate(found)
            if isinstance(shown, dict):
                assert found.keys() == shown.keys(), name
                if method == "POST" and "id" in found:
                    ids[shown["id"]] = found["id"]
            if method == "POST" and not found.keys() & {"state", "id"}:
                assert without(found) == without(shown), name


def without(answer: Any) -> Any:
    """What varies."""
    if isinstance(answer, dict):
        return {name: without(part) for name, part in answer.items() if name not in VARIES}
    return [without(part) for part in answer] if isinstance(answer, list) else answer


async def test_bodies_as_msgpack_mean_what_those_in_json_mean(tmp_path_factory, document):
    named = {operation["operationId"]: operation for operation in operations(document)}
    steps = {
        "register_node": "/v1/nodes",
        "post_report": f"/v1/nodes/{SOURCE}/reports",
        "lookup_placements": "/v1/placements:lookup",
    }

    async def answers(*kinds: str) -> list[Any]:
        """To the first example of each step, in the first of these kinds that it knows."""
        found = []
        async with running(tmp_path_factory.mktemp("app")) as r:
            for name, path in steps.items():
                content = named[name]["requestBody"]["content"]
                kind = next(kind for kind in kinds if kind in content)
                shown = examples(content[kind])[0]
                body = bytes.fromhex(shown) if kind == MEDIA_TYPE else json.dumps(shown).encode()
                answer = await r.http.post(path, content=body, headers={"Content-Type": kind})
                assert answer.status_code == 200, answer.text
                found.append(without(answer.json()))
        return found

    packed = await answers(MEDIA_TYPE, JSON)
    assert packed == await answers(JSON)
