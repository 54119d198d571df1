from __future__ import annotations

import re

import pytest

from kvstrata import errors
from kvstrata.api import HTTP_STATUS
from kvstrata.errors import KVStrataError, NamespaceMismatch, PeerRefused, from_code

CONDITIONS = KVStrataError.__subclasses__()


def test_the_drawn_tree_is_the_real_one() -> None:
    drawn = re.findall(r"[├└]── (\w+)", errors.__doc__ or "")
    assert drawn == [cls.__name__ for cls in CONDITIONS]
    assert {*drawn, "KVStrataError", "from_code"} == set(errors.__all__)


def test_codes_are_distinct() -> None:
    assert len({cls.code for cls in CONDITIONS}) == len(CONDITIONS)


@pytest.mark.parametrize("cls", CONDITIONS)
def test_an_error_crosses_a_wire(cls: type[KVStrataError]) -> None:
    error = from_code(cls.code, "because")
    assert type(error) is cls
    assert str(error) == "because"


def test_an_unknown_code_is_a_refusal() -> None:
    assert type(from_code("of the future", "no")) is PeerRefused
    assert type(from_code("error", "no")) is PeerRefused


def test_a_mismatch_names_its_field() -> None:
    assert NamespaceMismatch("differ", field="dtype").field == "dtype"
    assert NamespaceMismatch("differ").field == ""


@pytest.mark.parametrize("cls", CONDITIONS)
def test_every_condition_has_an_http_status(cls: type[KVStrataError]) -> None:
    assert 400 <= HTTP_STATUS[cls.code] < 600
