from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import Malformed, NamespaceMismatch
from kvstrata.keys import (
    DIGEST_BYTES,
    MAX_GROUPS,
    MAX_KEY_BYTES,
    Field,
    Group,
    Namespace,
    check_keys,
    make_key,
    require_same,
    split_key,
)
from kvstrata.testing.chunks import a_namespace

digests = st.binary(min_size=16, max_size=16)
group_ids = st.integers(0, 2**32 - 1)
hashes = st.binary(min_size=1, max_size=32)


@given(digests, group_ids, hashes)
def test_keys_round_trip(namespace: bytes, group: int, hash_: bytes) -> None:
    key = make_key(namespace, group, hash_)
    assert split_key(key) == (namespace, group, hash_)
    assert len(key) <= MAX_KEY_BYTES
    assert check_keys([key]) == [key]


@given(digests, st.lists(group_ids, min_size=2, unique=True), hashes)
def test_keys_sort_by_group(namespace: bytes, groups: list[int], hash_: bytes) -> None:
    keys = sorted(make_key(namespace, group, hash_) for group in groups)
    assert [split_key(key).group for key in keys] == sorted(groups)


@given(st.binary(max_size=80))
def test_any_bytes_are_a_key_or_malformed(raw: bytes) -> None:
    if 21 <= len(raw) <= 52:
        assert make_key(*split_key(raw)) == raw
        return
    with pytest.raises(Malformed, match=f"has {len(raw)}"):
        split_key(raw)
    with pytest.raises(Malformed):
        check_keys([make_key(bytes(16), 0, b"x"), raw])


@pytest.mark.parametrize(
    ("namespace", "group", "hash_"),
    [
        (bytes(15), 0, b"x"),
        (bytes(17), 0, b"x"),
        (bytes(16), -1, b"x"),
        (bytes(16), 2**32, b"x"),
        (bytes(16), 0, b""),
        (bytes(16), 0, bytes(33)),
    ],
)
def test_impossible_parts(namespace: bytes, group: int, hash_: bytes) -> None:
    with pytest.raises(Malformed):
        make_key(namespace, group, hash_)


# ---------------------------------------------------------------- namespaces

texts = st.text(max_size=20)
counts = st.integers(1, 64)
fields = st.builds(Field, name=texts, units=counts, unit_bytes=counts)
groups = st.builds(
    Group,
    id=group_ids,
    kind=st.sampled_from(["full", "sliding_window", "mla", "mamba", "opaque"]),
    layers=st.lists(texts, min_size=1, max_size=4).map(tuple),
    fields=st.lists(fields, min_size=1, max_size=3).map(tuple),
    tokens_per_block=counts,
    window=st.integers(0, 4096),
)
namespaces = st.builds(
    Namespace,
    model=texts,
    revision=texts,
    config=texts,
    dtype=texts,
    content_format=texts,
    groups=st.lists(groups, min_size=1, max_size=3, unique_by=lambda g: g.id).map(tuple),
    blocks_per_chunk=counts,
    hash_algorithm=texts,
    hash_seed=texts,
    scale_mode=texts,
    tenant=texts,
)


@given(namespaces)
def test_documents_round_trip(namespace: Namespace) -> None:
    again = Namespace.parse(namespace.document)
    assert again == namespace
    assert again.digest == namespace.digest
    assert len(namespace.digest) == DIGEST_BYTES


@given(namespaces, namespaces)
def test_digests_are_equal_iff_documents_are(one: Namespace, other: Namespace) -> None:
    assert (one.digest == other.digest) == (one == other)


def test_the_digest_is_stable() -> None:
    """A changed digest makes every store in the world cold: change it on purpose only."""
    assert a_namespace().document == (
        b'{"blocks_per_chunk":1,"config":"0","content_format":"test","dtype":"bfloat16",'
        b'"groups":[{"fields":[{"name":"kv","unit_bytes":1024,"units":2}],"id":0,"kind":"full",'
        b'"layers":["0","1"],"tokens_per_block":16,"window":0}],"hash_algorithm":"sha256",'
        b'"hash_seed":"0","layout":"page-u1","model":"test","revision":"0","scale_mode":"none",'
        b'"schema":1,"tenant":""}'
    )
    assert a_namespace().digest.hex() == "9ddb613056c8be4fb741aac22bfcc896"


def test_chunk_bytes() -> None:
    namespace = msgspec.structs.replace(a_namespace(), blocks_per_chunk=3)
    assert namespace.groups[0].page_bytes == 2 * 2 * 1024
    assert namespace.chunk_bytes == {0: 3 * 2 * 2 * 1024}


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"model": "other"}, "model"),
    ({"revision": "1"}, "revision"),
    ({"config": "1"}, "config"),
    ({"dtype": "fp8"}, "dtype"),
    ({"content_format": "x"}, "content_format"),
    ({"blocks_per_chunk": 2}, "blocks_per_chunk"),
    ({"hash_algorithm": "x"}, "hash_algorithm"),
    ({"hash_seed": "1"}, "hash_seed"),
    ({"scale_mode": "x"}, "scale_mode"),
    ({"tenant": "x"}, "tenant"),
    ({"groups": ()}, "len(groups)"),
    ({"tokens_per_hash": 8}, "tokens_per_hash"),
]


@pytest.mark.parametrize(("change", "field"), CHANGES)
def test_a_mismatch_names_the_field(change: dict[str, Any], field: str) -> None:
    ours = a_namespace()
    with pytest.raises(NamespaceMismatch) as caught:
        require_same(ours, msgspec.structs.replace(ours, **change))
    assert caught.value.field == field
    assert "here" in str(caught.value)
    assert "there" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": 1}, "groups[0].id"),
        ({"kind": "mla"}, "groups[0].kind"),
        ({"window": 9}, "groups[0].window"),
        ({"layers": ("0", "9")}, "groups[0].layers[1]"),
        ({"layers": ("0",)}, "len(groups[0].layers)"),
        ({"fields": (Field("kv", 4, 1024),)}, "groups[0].fields[0].units"),
        ({"tokens_per_block": 32}, "groups[0].tokens_per_block"),
    ],
)
def test_a_mismatch_inside_a_group(change: dict[str, Any], field: str) -> None:
    ours = a_namespace()
    theirs = msgspec.structs.replace(
        ours, groups=(msgspec.structs.replace(ours.groups[0], **change),)
    )
    with pytest.raises(NamespaceMismatch) as caught:
        require_same(ours, theirs)
    assert caught.value.field == field


def test_every_field_takes_part_in_the_comparison() -> None:
    compared = {field.split("[")[0].removeprefix("len(").rstrip(")") for _, field in CHANGES}
    fixed = {"layout", "schema"}  # one value each; `parse` refuses others
    assert compared | fixed == set(Namespace.__struct_fields__)


def test_equal_namespaces_are_the_same() -> None:
    require_same(a_namespace(), a_namespace())


@given(st.binary(max_size=200))
def test_any_bytes_are_a_document_or_malformed(raw: bytes) -> None:
    with pytest.raises(Malformed):
        Namespace.parse(raw)


def edited(**changes: Any) -> bytes:
    document = msgspec.to_builtins(a_namespace())
    document.update(changes)
    return msgspec.json.encode(document)


def group_edited(**changes: Any) -> bytes:
    [group] = msgspec.to_builtins(a_namespace())["groups"]
    return edited(groups=[{**group, **changes}])


@pytest.mark.parametrize(
    "raw",
    [
        edited(schema=2),
        edited(layout="page-u2"),
        edited(blocks_per_chunk=0),
        edited(groups=[]),
        edited(groups=msgspec.to_builtins(a_namespace())["groups"] * 2),
        edited(colour="blue"),
        edited(model=7),
        group_edited(id=-1),
        group_edited(id=2**32),
        group_edited(kind="quantum"),
        group_edited(layers=[]),
        group_edited(fields=[]),
        group_edited(tokens_per_block=0),
        group_edited(window=-1),
        group_edited(fields=[{"name": "kv", "units": 0, "unit_bytes": 1}]),
        group_edited(fields=[{"name": "kv", "units": 1, "unit_bytes": 1 << 40}]),
        edited(blocks_per_chunk=1 << 40),
        edited(tokens_per_hash=0),
        edited(tokens_per_hash=3),
    ],
)
def test_documents_that_cannot_be(raw: bytes) -> None:
    with pytest.raises(Malformed, match="namespace"):
        Namespace.parse(raw)


def test_so_many_groups_and_no_more() -> None:
    [group] = msgspec.to_builtins(a_namespace())["groups"]
    groups = [{**group, "id": n} for n in range(MAX_GROUPS + 1)]
    assert len(Namespace.parse(edited(groups=groups[1:])).groups) == MAX_GROUPS
    with pytest.raises(Malformed, match=f"{MAX_GROUPS + 1} groups, and at most {MAX_GROUPS}"):
        Namespace.parse(edited(groups=groups))


def test_tokens_per_hash_are_those_of_a_block_or_told() -> None:
    assert a_namespace().hash_step == 16
    [group] = a_namespace().groups
    mixed = (group, msgspec.structs.replace(group, id=1, tokens_per_block=24))
    assert msgspec.structs.replace(a_namespace(), groups=mixed).hash_step is None
    told = Namespace.parse(edited(groups=msgspec.to_builtins(mixed), tokens_per_hash=8))
    assert told.hash_step == 8
    assert Namespace.parse(told.document).digest == told.digest


def test_a_namespace_cannot_change_under_its_digest() -> None:
    namespace = a_namespace()
    with pytest.raises(AttributeError):
        namespace.model = "other"  # type: ignore[misc]
    assert hash(namespace) == hash(a_namespace())
