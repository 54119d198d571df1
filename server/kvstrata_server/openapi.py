"""The published document: `python -m kvstrata_server.openapi > openapi/kvstrata.json`."""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvstrata.api import Problem
from kvstrata.bulk import MEDIA_TYPE
from kvstrata_server.access.auth import OPEN_PATHS
from kvstrata_server.examples import show_examples
from kvstrata_server.examples.packed import BODIES, OTHER_BODIES, packed_example

__all__ = ["document", "text"]

_DESCRIPTION = """\
Keys are lower-case hexadecimal: namespace digest (16 bytes), group (4), hash (1 to 32). Times are
seconds since the epoch, durations are seconds. Every error is a problem document (RFC 9457) whose
`code` names the condition. Lists take `after` (the `next` of the page before) and `limit`. Fields
of bodies and parameters of queries that an operation does not know are errors, except at the
compatible routes.

Reports and lookups of many keys may be sent as `application/msgpack`: maps with the same fields,
but that a list of keys is a list of runs, in order: `{namespace, group, size, hashes}`, each for
keys that share namespace (16 bytes), group (a number) and length of hash (`size`), with their
hashes in one piece; token ids are in one piece, too. What has the format `binary` is of msgpack's
type bin. The answer is the same JSON.
"""
_TAGS = {
    "nodes": "What nodes say of themselves and are told. People read here how their nodes fare.",
    "placements": "Who holds which chunks, and of which model, weights and layout they are.",
    "transfers": "Moving chunks to where they will be used, from other nodes or from a node's own "
    "disks and stores. A transfer always ends, with an outcome for each key.",
    "leases": "Keeping chunks in a node's host memory for a while.",
    "quotas": "How much tenants may hold and move, and what they do.",
    "evictions": "Having nodes give chunks up, as after new weights or on a tenant's request.",
    "drains": "Making it safe to stop a node: what only it holds goes elsewhere first.",
    "events": "Changes as they happen, for those who keep an index of their own.",
    "audit": "Who changed what.",
    "compatible": "Routes of Dynamo's indexer and of Mooncake's conductor, for clients of those.",
    "health": "Whether this process works, and what it counts.",
}


_PROBLEM = Problem(
    title="Not here", status=404, detail="node 'gpu-12' never registered here", code="missing"
)


def document(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of this app."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version="3.1.0",
        summary=app.summary,
        description=_DESCRIPTION,
        routes=app.routes,
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
    )
    components = made.setdefault("components", {})
    # Only referred to by responses of another media type, which FastAPI doesn't look into.
    problem = Problem.model_json_schema(
        ref_template="#/components/schemas/{model}", mode="serialization"
    )
    problem["examples"] = [_PROBLEM.model_dump(mode="json")]
    components.setdefault("schemas", {}).update(problem.pop("$defs"), Problem=problem)
    for operations in made["paths"].values():
        for operation in operations.values():
            _name_types(operation.get("parameters", []))
            show_examples(operation)
            if operation["operationId"] in BODIES:
                _add_msgpack(operation, components["schemas"])
    _name_properties(made)
    components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    made["security"] = [{"bearer": []}]
    for path in OPEN_PATHS:
        for operation in made["paths"][path].values():
            operation["security"] = []
    return made


def _add_msgpack(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """The second content type of a body, which FastAPI knows nothing of."""
    name = operation["operationId"]
    kinds = [type(BODIES[name]), *OTHER_BODIES.get(name, ())]
    schemas_of, found = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    _say_binary(found)
    schemas |= found
    operation["requestBody"]["content"][MEDIA_TYPE] = {
        "schema": schemas_of[0] if len(kinds) == 1 else {"anyOf": list(schemas_of)},
        "examples": {
            "hexadecimal": {"summary": "The body's bytes", "value": packed_example(name)},
        },
    }


def _say_binary(schema: Any) -> None:
    """msgspec describes JSON, where bytes were base64, and leaves out that words are text."""
    for part in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(part, dict | list):
            _say_binary(part)
    if isinstance(schema, dict):
        if schema.pop("contentEncoding", None) == "base64":
            schema["format"] = "binary"
        if "enum" in schema:
            schema["type"] = "string"


def _name_properties(schema: Any) -> None:
    """Objects whose names follow a pattern, said so that generators of clients understand it: of
    what pydantic says, `patternProperties`, they make objects that lose all they are given."""
    if isinstance(schema, dict):
        if patterns := schema.pop("patternProperties", None):
            [(pattern, schema["additionalProperties"])] = patterns.items()
            schema["propertyNames"] = {"pattern": pattern}
        for part in schema.values():
            _name_properties(part)
    elif isinstance(schema, list):
        for part in schema:
            _name_properties(part)


def _name_types(parameters: list[dict[str, Any]]) -> None:
    """A query or a header leaves a value out; it can't say null, as FastAPI would have it."""
    for parameter in parameters:
        schema = parameter["schema"]
        kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1:
            del schema["anyOf"]
            schema |= kinds[0]


def text(app: FastAPI) -> str:
    """The document as it is kept in the repository."""
    return json.dumps(document(app), indent=1, sort_keys=True) + "\n"


def main() -> None:
    from kvstrata.config import ServerSettings
    from kvstrata_server.app import create_app

    sys.stdout.write(text(create_app(ServerSettings())))


if __name__ == "__main__":
    main()
