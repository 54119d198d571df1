from pathlib import Path

import pytest
from server_kit import database_url

from kvstrata.config import ServerSettings
from kvstrata_server import openapi
from kvstrata_server.app import create_app

PUBLISHED = Path(__file__).parents[2] / "openapi" / "kvstrata.json"


@pytest.fixture
def document(tmp_path):
    return openapi.document(create_app(ServerSettings(database=database_url(tmp_path))))


def test_the_published_document_equals_the_code(tmp_path):
    made = openapi.text(create_app(ServerSettings(database=database_url(tmp_path))))
    assert PUBLISHED.read_text() == made, (
        "run: python -m kvstrata_server.openapi > openapi/kvstrata.json"
    )


def test_it_says_how_to_authenticate_and_where_not_to(document):
    assert document["openapi"] == "3.1.0"
    assert document["security"] == [{"bearer": []}]
    assert document["paths"]["/healthz"]["get"]["security"] == []
    assert "security" not in document["paths"]["/v1/nodes"]["get"]


def test_every_operation_is_named_described_and_documents_its_problems(document):
    seen = []
    described = {tag["name"] for tag in document["tags"]}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            name = operation["operationId"]
            seen.append(name)
            assert operation["description"], name
            # Not FastAPI's, which is the name once more.
            assert operation["summary"] != name.replace("_", " ").title(), f"{name}: summary=..."
            assert {*operation["tags"]} <= described, f"{name}: describe its tag in openapi.py"
            if path in ("/healthz", "/readyz"):
                continue
            problem = operation["responses"]["401"]["content"]["application/problem+json"]
            assert problem["schema"]["$ref"] == "#/components/schemas/Problem"
            assert "HTTPValidationError" not in str(operation)
    assert len(seen) == len(set(seen))
    assert {"lookup_placements", "create_transfer", "list_audit"} <= set(seen)
    assert "Problem" in document["components"]["schemas"]


def test_every_reference_leads_somewhere(document):
    def references(node):
        if isinstance(node, dict):
            for name, value in node.items():
                if name == "$ref":
                    yield value
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    for reference in references(document):
        kind, name = reference.removeprefix("#/components/").split("/")
        assert name in document["components"][kind]
