import pytest
from pydantic import TypeAdapter, ValidationError

from kvstrata import api, errors
from kvstrata.errors import Malformed
from kvstrata.keys import MAX_HASH_BYTES, make_key

KEY = make_key(b"n" * 16, 3, b"h")
check = TypeAdapter(api.HexKey).validate_python


def test_every_condition_has_an_http_status():
    codes = {
        error.code
        for error in vars(errors).values()
        if isinstance(error, type)
        and issubclass(error, errors.KVStrataError)
        and error is not errors.KVStrataError
    }
    assert codes == set(api.HTTP_STATUS)
    assert all(400 <= status < 600 for status in api.HTTP_STATUS.values())


@pytest.mark.parametrize("length", [1, 8, MAX_HASH_BYTES])
def test_keys_travel_as_hex(length):
    key = make_key(b"n" * 16, 3, b"h" * length)
    assert check(key.hex()) == key.hex()
    assert check(key.hex().upper()) == key.hex()
    assert api.from_hex(key.hex()) == key


@pytest.mark.parametrize(
    "text",
    ["", "ab" * 20, "ab" * 53, "ab" * 20 + "a", "zz" * 21, " " + "ab" * 21, "ab" * 21 + "\n"],
)
def test_what_cannot_be_a_key_is_refused(text):
    with pytest.raises(ValidationError):
        check(text)


@pytest.mark.parametrize("text", ["", "zz" * 21, "ab" * 20, "ab" * 53, "abc" * 15])
def test_from_hex_refuses_likewise(text):
    with pytest.raises(Malformed):
        api.from_hex(text)


def test_unknown_fields_are_errors_in_requests_and_ignored_in_answers():
    with pytest.raises(ValidationError, match="surprise"):
        api.LookupRequest.model_validate({"keys": [KEY.hex()], "surprise": 1})
    reply = api.LookupReply.model_validate({"keys": 1, "nodes": [], "surprise": 1})
    assert reply == api.LookupReply(keys=1, nodes=[])


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 129, "ä"])
def test_names_are_checked(name):
    with pytest.raises(ValidationError):
        api.NodeRegistration(id=name, incarnation="i")


def test_only_queued_and_running_have_not_ended():
    assert {s for s in api.TransferState if not s.ended} == {
        api.TransferState.QUEUED,
        api.TransferState.RUNNING,
    }


def test_lists_are_bounded():
    for message in (
        lambda: api.LookupRequest(keys=[]),
        lambda: api.LookupRequest(keys=[KEY.hex()] * (api.MAX_KEYS + 1)),
        lambda: api.Change(location="host", added=[KEY.hex()] * (api.MAX_KEYS + 1)),
    ):
        with pytest.raises(ValidationError):
            message()
