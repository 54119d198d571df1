"""`POST /v1/placements:lookup` by token ids, and what it tells of hybrid models."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from server_kit import Running, host, join, report, running, store

from kvstrata import api
from kvstrata.bulk import (
    MEDIA_TYPE,
    BulkLookup,
    BulkModelLookup,
    BulkModelTokens,
    BulkNamespaceLookup,
    BulkNamespaceTokens,
    packed_tokens,
    runs_of,
)
from kvstrata.errors import Malformed, Missing
from kvstrata.keys import MAX_GROUPS, Field, Group, Namespace
from kvstrata.testing.geometries import GEOMETRIES
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role
from kvstrata_server.lookups import apart, lookup, prompts
from kvstrata_server.lookups.hashing import chunk_keys
from kvstrata_server.placement import index
from kvstrata_server.placement.namespaces import Namespaces

BLOCK = 4
TOKENS = list(range(100, 140))  # ten blocks, five chunks


def a_namespace(algorithm: str = "xxh3", **changes: Any) -> Namespace:
    group = Group(0, "full", ("l",), (Field("kv", 1, 8),), BLOCK)
    made = Namespace(*("m", "r", "c", "bf16", "f"), (group,), 2, algorithm, "")
    return msgspec.structs.replace(made, **changes)


NAMESPACE = a_namespace()


def hexes(namespace: Namespace, *numbers: int, group: int = 0) -> list[str]:
    keys = chunk_keys(namespace, TOKENS)[group]
    return [keys[n].hex() for n in numbers]


def a_report(*changes: api.Change, of: tuple[Namespace, ...] = (NAMESPACE,)) -> api.Report:
    return report(0, *changes, namespaces=tuple(n.document.decode() for n in of))


def by_model(token_ids: list[int] = TOKENS, **fields: Any) -> api.TokenLookup:
    return api.TokenLookup(tokens=api.ModelTokens(model="m", token_ids=token_ids, **fields))


def by_digest(namespace: Namespace, token_ids: list[int] = TOKENS) -> api.TokenLookup:
    asked = api.NamespaceTokens(namespace=namespace.digest.hex(), token_ids=token_ids)
    return api.TokenLookup(tokens=asked)


async def test_as_by_the_keys_that_the_tokens_have(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        for node in "ab":
            await join(r.control, node, stores=(f"s{node}",))
        await r.control.report("a", a_report(host(hexes(NAMESPACE, 0, 1, 2, 4))))
        first = store("sb", hexes(NAMESPACE, 0))
        await r.control.report("b", a_report(host(hexes(NAMESPACE, 1)), first))
        by_keys = api.LookupRequest(keys=hexes(NAMESPACE, 0, 1, 2, 3, 4), return_keys=True)
        wanted = await r.control.lookup(by_keys)
        assert [(n.node, n.tokens, n.keys) for n in wanted.nodes] == [
            ("a", 24, hexes(NAMESPACE, 0, 1, 2)),
            ("b", 16, hexes(NAMESPACE, 0, 1)),
        ]
        assert wanted.nodes[1].tiers == {
            "host": api.Tally(found=1, prefix=0, tokens=0),
            "fs": api.Tally(found=1, prefix=1, tokens=8),
        }
        for node in wanted.nodes:
            node.namespace = NAMESPACE.digest.hex()
        for asked in (by_model(), by_digest(NAMESPACE)):
            asked.return_keys = True
            assert await r.control.lookup(asked) == wanted
        # The last chunk is not whole, or none is.
        assert [n.prefix for n in (await r.control.lookup(by_model(TOKENS[:23]))).nodes] == [2, 2]
        assert await r.control.lookup(by_model(TOKENS[:7])) == api.LookupReply(keys=0, nodes=[])
        only = by_model()
        only.nodes = ["b", "zz"]
        assert [n.node for n in (await r.control.lookup(only)).nodes] == ["b"]


async def test_each_namespace_of_a_model_counts_by_itself(tmp_path: Path) -> None:
    smaller = a_namespace(dtype="fp8", blocks_per_chunk=1)
    unknown = a_namespace("sha256", revision="r2")
    salted = a_namespace(tenant="acme")
    others = (smaller, unknown, salted)
    async with running(tmp_path) as r:
        for node in "ab":
            await join(r.control, node)
        both = host([*hexes(NAMESPACE, 0), *hexes(smaller, 0, 1, 2)])
        await r.control.report("a", a_report(both, of=(NAMESPACE, *others)))
        await r.control.report("b", a_report(host(hexes(salted, 0, 1)), of=(salted,)))
        reply = await r.control.lookup(by_model())
        assert [(n.node, n.namespace, n.tokens, n.prefix) for n in reply.nodes] == [
            ("a", smaller.digest.hex(), 12, 3),
            ("a", NAMESPACE.digest.hex(), 8, 1),
        ]
        assert reply.keys == 10 + 5
        [(digest, why)] = reply.refused.items()
        assert digest == unknown.digest.hex()
        assert "`hash_seeds`" in why
        reply = await r.control.lookup(by_model(tenant="acme"))
        assert [(n.node, n.tokens) for n in reply.nodes] == [("b", 16)]
        # What can't be computed at all is refused.
        with pytest.raises(Malformed, match="`hash_seeds`"):
            await r.control.lookup(by_model(revision="r2"))
        with pytest.raises(Malformed, match="`hash_seeds`"):
            await r.control.lookup(by_digest(unknown))
        for asked in (by_model(revision="r9"), by_model(tenant="x"), by_digest(a_namespace("x"))):
            with pytest.raises(Missing, match="no node has reported"):
                await r.control.lookup(asked)


def published(model: str, **changes: Any) -> Namespace:
    """A model as vLLM would describe it that hashes by `sha256_cbor` from its usual seed."""
    [found] = [g for g in GEOMETRIES if g.model == model]
    groups = tuple(each.group for each in found.groups)
    seed = "af1d66864a65bf053e4b2136699aef08"
    made = Namespace(model, "r", "c", "bf16", "f", groups, 1, "sha256_cbor", seed)
    return msgspec.structs.replace(made, **changes).checked()


QWEN = published("Qwen/Qwen3.6-35B-A3B")
DEEPSEEK = published("deepseek-ai/DeepSeek-V4-Flash", tokens_per_hash=4)
PROMPT = [random.Random(7).randrange(150_000) for _ in range(1100)]


def of_model(namespace: Namespace, **fields: Any) -> api.TokenLookup:
    asked = api.ModelTokens(model=namespace.model, token_ids=PROMPT)
    return api.TokenLookup(tokens=asked, **fields)


async def test_a_model_with_states(tmp_path: Path) -> None:
    """Group 0 has states, group 1 attention, both by 256 tokens."""
    keys = {g: [key.hex() for key in of] for g, of in chunk_keys(QWEN, PROMPT).items()}
    states, full = keys[0], keys[1]
    async with running(tmp_path) as r:
        for node in "abc":
            await join(r.control, node, stores=(f"s{node}",))
        # a: four chunks of attention, and the state after the third; its store adds the fourth.
        of = (QWEN,)
        last = store("sa", [states[0], *states[3:], *full])
        await r.control.report("a", a_report(host([*full, states[2]]), last, of=of))
        await r.control.report("b", a_report(host([*full[:3], *states]), of=of))
        await r.control.report("c", a_report(host([*states, *full[1:]]), of=of))

        reply = await r.control.lookup(of_model(QWEN, return_keys=True))
        assert [(n.node, n.tokens) for n in reply.nodes] == [("a", 1024), ("b", 768), ("c", 0)]
        a, b, c = reply.nodes
        assert {tier: t.tokens for tier, t in a.tiers.items()} == {"host": 768, "fs": 1024}
        assert a.keys == [*full[:3], states[3], full[3]]
        assert b.keys == [*full[:2], states[2], full[2]]
        assert c.keys == []
        # `prefix` and `found` are of the keys one by one, each chunk's state before its attention.
        assert (reply.keys, a.prefix, b.prefix, c.prefix) == (8, 2, 7, 1)
        assert a.tiers["host"].found == 5

        # The same by keys, however those of the two groups are mixed.
        for asked in ([*full, *states], [*states, *full], [states[0], *full, *states[1:]]):
            reply = await r.control.lookup(api.LookupRequest(keys=asked, return_keys=True))
            assert [(n.node, n.tokens) for n in reply.nodes] == [("a", 1024), ("b", 768), ("c", 0)]
            assert set(reply.nodes[0].keys or ()) == set(a.keys)
        bulk = BulkLookup(runs_of(map(bytes.fromhex, [*full, *states])))
        answer = await packed(r, bulk)
        assert [(n.node, n.tokens) for n in answer.nodes] == [("a", 1024), ("b", 768), ("c", 0)]

        # A transfer moves what the prefix needs and no more.
        moved = await r.control.create_transfer(
            api.TransferRequest(target="c", source="a", keys=a.keys or [], dry_run=True)
        )
        sizes = QWEN.chunk_bytes
        assert moved.bytes == sizes[1]  # it has all but the first chunk of attention
        assert moved.counts == {api.Outcome.PENDING: 1, api.Outcome.PRESENT: 4}
        # And so it does of the tokens that this node may have.
        tokens_ = api.ModelTokens(model=QWEN.model, token_ids=PROMPT[: a.tokens])
        by_tokens = await r.control.create_transfer(
            api.TokenTransfer(target="c", source="a", tokens=tokens_, dry_run=True)
        )
        assert by_tokens.keys == moved.keys
        body = {"node": "a", "tokens": tokens_.model_dump(), "dry_run": True}
        prefetched = (await r.http.post("/v1/prefetches", json=body)).json()
        assert (prefetched["source"], prefetched["bytes"]) == ("own", sizes[0])
        hits = "kvstrata_lookup_prefix_keys_total"
        assert f"{hits} {8.0 * 5}" in (await r.http.get("/metrics")).text


async def test_a_model_with_windows_of_several_sizes(tmp_path: Path) -> None:
    keys = {g: [key.hex() for key in of] for g, of in chunk_keys(DEEPSEEK, PROMPT).items()}
    async with running(tmp_path) as r:
        for node in "ab":
            await join(r.control, node)
        # What a prefix of 512 tokens needs: windows of 128 by chunks of 64, of 8 by 4, of 128 by 8.
        needed = [
            *keys[0][6:8],
            *(key for group in (1, 2, 3) for key in keys[group][:2]),
            *keys[4][126:128],
            *keys[5][126:128],
            *keys[6][48:64],
        ]
        await r.control.report("a", a_report(host(needed), of=(DEEPSEEK,)))
        lost = [key for key in needed if key != keys[6][48]]
        await r.control.report("b", a_report(host(lost), of=(DEEPSEEK,)))
        reply = await r.control.lookup(of_model(DEEPSEEK, return_keys=True))
        assert [(n.node, n.tokens) for n in reply.nodes] == [("a", 512), ("b", 0)]
        assert set(reply.nodes[0].keys or ()) == set(needed)
        assert reply.keys == 4 * (2 + 3 * 1 + 2 + 2 + 16)
        everything = [key for of in keys.values() for key in of]
        reply = await r.control.lookup(api.LookupRequest(keys=everything, return_keys=True))
        assert [(n.node, n.tokens) for n in reply.nodes] == [("a", 512), ("b", 0)]
        assert set(reply.nodes[0].keys or ()) == set(needed)
        # Dynamo's clients are told the same.
        asked = {"model_name": DEEPSEEK.model, "token_ids": PROMPT}
        answer = (await r.http.post("/query", json=asked)).json()
        assert {n: of["cpu"] for n, of in answer["instances"].items()} == {"a": 512}


async def test_keys_that_do_not_tell_how_much_can_be_reused(tmp_path: Path) -> None:
    keys = {g: [key.hex() for key in of] for g, of in chunk_keys(QWEN, PROMPT).items()}
    async with running(tmp_path) as r:
        await join(r.control, "a")
        everything = host([*keys[0], *keys[1], *hexes(NAMESPACE, 0)])
        await r.control.report("a", a_report(everything, of=(QWEN,)))
        for asked, prefix in (
            (keys[1], 4),  # no states were asked for
            ([*keys[1], *hexes(NAMESPACE, 0)], 5),  # of two namespaces
            (hexes(NAMESPACE, 0, 1), 1),  # its document wasn't reported
        ):
            reply = await r.control.lookup(api.LookupRequest(keys=asked, return_keys=True))
            [node] = reply.nodes
            assert (node.tokens, node.tiers["host"].tokens) == (None, None)
            assert (node.prefix, node.keys) == (prefix, asked[:prefix])


async def test_a_group_of_which_nobody_has_any(tmp_path: Path) -> None:
    keys = {g: [key.hex() for key in of] for g, of in chunk_keys(QWEN, PROMPT).items()}
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await r.control.report("a", a_report(host(keys[1]), of=(QWEN,)))
        for asked in (of_model(QWEN), api.LookupRequest(keys=[*keys[1], *keys[0]])):
            [node] = (await r.control.lookup(asked)).nodes
            assert (node.tokens, node.tiers["host"].found) == (0, 4)


async def test_transfers_are_of_one_namespace_and_of_whole_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as r:
        await join(r.control, "a")
        other = a_namespace(dtype="fp8")
        await r.control.report("a", a_report(of=(NAMESPACE, other)))

        async def moved(asked: api.TokenLookup) -> api.TransferInfo:
            transfer = api.TokenTransfer(target="a", tokens=asked.tokens, dry_run=True)
            return await r.control.create_transfer(transfer)

        with pytest.raises(Malformed, match=NAMESPACE.digest.hex()):
            await moved(by_model())
        info = await moved(by_digest(other))
        assert [key.key for key in info.keys] == hexes(other, *range(5))
        with pytest.raises(Malformed, match="every 8 of them"):
            await moved(by_digest(other, TOKENS[:7]))
        monkeypatch.setattr(api, "MAX_KEYS", 4)
        with pytest.raises(Malformed, match="need 5 keys"):
            await moved(by_digest(other))


async def test_a_lease_takes_tokens_as_transfers_do(tmp_path: Path) -> None:
    """The same keys, and the same errors."""
    async with running(tmp_path) as r:
        await join(r.control, "a")
        other = a_namespace(dtype="fp8")
        await r.control.report("a", a_report(of=(NAMESPACE, other)))

        async def post(at: str, tokens_: dict[str, Any], **more: Any) -> httpx.Response:
            return await r.http.post(at, json={"node": "a", "tokens": tokens_, **more})

        def of(namespace: Namespace, token_ids: list[int] = TOKENS) -> dict[str, Any]:
            return {"namespace": namespace.digest.hex(), "token_ids": token_ids}

        made = await post("/v1/leases", of(other), ttl=90)
        assert made.status_code == 202
        assert [key["key"] for key in made.json()["keys"]] == hexes(other, *range(5))
        [command] = (await r.control.commands("a", "i1")).commands
        assert (command.keys, command.sources, command.hold) == (hexes(other, *range(5)), [], 90)
        for wrong, status in (
            ({"model": "m", "token_ids": TOKENS}, 422),  # which of its two namespaces?
            ({"model": "x", "token_ids": TOKENS}, 404),
            (of(a_namespace("x")), 404),
            (of(other, TOKENS[:7]), 422),
            (of(other, []), 422),
        ):
            answers = [await post(at, wrong) for at in ("/v1/leases", "/v1/prefetches")]
            assert [answer.status_code for answer in answers] == [status, status]
            assert answers[0].json() == answers[1].json()
        both = {"node": "a", "keys": hexes(other, 0), "tokens": of(other)}
        for body in (both, {"node": "a"}):
            assert (await r.http.post("/v1/leases", json=body)).status_code == 422


async def packed(r: Running, asked: Any, status: int = 200) -> api.LookupReply:
    answer = await r.http.post(
        "/v1/placements:lookup",
        content=msgspec.msgpack.encode(asked),
        headers={"content-type": MEDIA_TYPE},
    )
    assert answer.status_code == status, answer.text
    if status != 200:
        raise Malformed(answer.json()["detail"])
    return api.LookupReply.model_validate_json(answer.content)


async def test_as_msgpack(tmp_path: Path) -> None:
    async with running(tmp_path) as r:
        await join(r.control, "a")
        await r.control.report("a", a_report(host(hexes(NAMESPACE, 0, 1))))
        asked = by_model()
        asked.return_keys = True
        wanted = await r.control.lookup(asked)
        assert wanted.nodes[0].tokens == 16
        of_namespace = BulkNamespaceTokens(NAMESPACE.digest.hex(), packed_tokens(TOKENS))
        assert await packed(r, BulkNamespaceLookup(of_namespace, return_keys=True)) == wanted
        model = BulkModelTokens("m", packed_tokens(TOKENS))
        assert await packed(r, BulkModelLookup(model, return_keys=True)) == wanted
        assert (await packed(r, BulkModelLookup(model, nodes=["b"]))).nodes == []
        # Longer ones than JSON may have, and some that are too long.
        many = [*TOKENS, *([7] * api.MAX_TOKENS)]
        reply = await packed(r, BulkModelLookup(BulkModelTokens("m", packed_tokens(many))))
        assert (reply.keys, reply.nodes[0].tokens) == (len(many) // 8, 16)
        for wrong, why in (
            ({"tokens": {"token_ids": b"1234"}}, "namespace"),
            ({"tokens": {"model": "m", "token_ids": [1]}}, "Expected `bytes`"),
            ({"tokens": {"model": "m", "token_ids": b"12345"}}, "5 bytes"),
            ({"tokens": {"model": "m", "token_ids": b""}}, "0 token ids"),
            ({"tokens": {"model": "m", "token_ids": bytes((4 << 20) + 4)}}, "not 1 to 1048576"),
            ({"tokens": {"model": "m", "token_ids": b"1234"}, "mode": "all"}, "mode"),
            ({"tokens": {"model": "m", "token_ids": b"1234"}, "keys": []}, "keys"),
            ({"tokens": [1]}, "object"),
            ({}, "keys"),
            ([], "object"),
        ):
            with pytest.raises(Malformed, match=why):
                await packed(r, wrong, 422)


async def test_what_is_no_question(tmp_path: Path) -> None:
    tokens_: dict[str, Any] = {"model": "m", "token_ids": [1]}
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, "body"),
        ({"tokens": {"model": "m"}}, "token_ids"),
        ({"tokens": {"model": "m", "token_ids": []}}, "token_ids"),
        ({"tokens": {"model": "m", "token_ids": [1 << 32]}}, "token_ids"),
        ({"tokens": {"model": "m", "token_ids": [True]}}, "token_ids"),
        ({"tokens": {"model": "m", "token_ids": ["1"]}}, "token_ids"),
        ({"tokens": {"model": "m", "token_ids": [1] * (api.MAX_TOKENS + 1)}}, "token_ids"),
        ({"tokens": {"token_ids": [1]}}, "tokens"),
        ({"tokens": {"namespace": "00", "token_ids": [1]}}, "namespace"),
        ({"tokens": {"model": "m", "namespace": "0" * 32, "token_ids": [1]}}, "namespace"),
        ({"tokens": tokens_, "keys": ["00" * 21]}, "keys"),
        ({"tokens": tokens_, "mode": "all"}, "mode"),
    ]
    async with running(tmp_path) as r:
        for body, loc in wrong:
            answer = await r.http.post("/v1/placements:lookup", json=body)
            assert answer.status_code == 422
            locs = {part for error in answer.json()["errors"] for part in error["loc"]}
            assert loc in locs, (body, locs)


async def test_a_token_asks_about_its_tenants_only(tmp_path: Path) -> None:
    async with running(tmp_path, token="root") as r:
        salted = a_namespace(tenant="acme")
        await join(r.control, "a")
        await r.control.report("a", a_report(host(hexes(salted, 0)), of=(salted, NAMESPACE)))
        digest = salted.digest.hex()
        for tenant, statuses in (("acme", [200, 200, 403]), ("other", [404, 403, 403])):
            token = await tokens.create(
                r.state.database, tenant, Role.READ, now=r.clock(), tenants=[tenant]
            )
            await r.state.tokens.refresh()
            asked = [
                {"model": "m", "tenant": "acme", "token_ids": TOKENS},
                {"namespace": digest, "token_ids": TOKENS},
                {"namespace": NAMESPACE.digest.hex(), "token_ids": TOKENS},
            ]
            for tokens_, status in zip(asked, statuses, strict=True):
                in_one = {**tokens_, "token_ids": packed_tokens(TOKENS)}
                for headers, content in (
                    ("application/json", msgspec.json.encode({"tokens": tokens_})),
                    (MEDIA_TYPE, msgspec.msgpack.encode({"tokens": in_one})),
                ):
                    answer = await r.http.post(
                        "/v1/placements:lookup",
                        content=content,
                        headers={"Authorization": f"Bearer {token}", "content-type": headers},
                    )
                    assert answer.status_code == status, (tenant, tokens_, answer.text)
        for content in (b"\xc1", msgspec.msgpack.encode({"tokens": asked[0]})):
            unknown = await r.http.post(
                "/v1/placements:lookup", content=content, headers={"content-type": MEDIA_TYPE}
            )
            assert unknown.status_code == 401


async def test_blocks_and_windows_longer_than_any_prompt(tmp_path: Path) -> None:
    """What a node says of its model may be odd, and keeps nobody from asking about others."""
    vast = a_namespace(
        dtype="int4",
        groups=tuple(
            Group(n, kind, ("l",), (Field("kv", 1, 8),), blocks, window)
            for n, (kind, blocks, window) in enumerate(
                (
                    ("full", (1 << 61) - 1, 0),
                    ("mamba", (1 << 31) - 1, 0),
                    ("sliding_window", BLOCK, (1 << 63) - 1),
                )
            )
        ),
        tokens_per_hash=1,
    )
    wide = a_namespace(dtype="int8", groups=(vast.groups[2],))
    huge = a_namespace(dtype="fp4", groups=vast.groups[:1])
    async with running(tmp_path) as r:
        await join(r.control, "a")
        of = (NAMESPACE, vast, wide, huge)
        held = [
            *hexes(NAMESPACE, 0, 1),
            *hexes(wide, 0, 1, 2, group=2),
            *(vast.key(group, b"h").hex() for group in range(3)),
        ]
        await r.control.report("a", a_report(host(held), of=of))
        reply = await r.control.lookup(by_model())
        assert reply.refused == {}
        assert {node.namespace: node.tokens for node in reply.nodes} == {
            NAMESPACE.digest.hex(): 16,
            wide.digest.hex(): 24,
        }
        for keys, tokens_ in ((held[2:5], 24), (held[5:], 0)):
            (node,) = (await r.control.lookup(api.LookupRequest(keys=keys))).nodes
            assert (node.prefix, node.tokens) == (3, tokens_)


async def test_long_prompts_are_hashed_on_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    hashes = prompts.prefix_hashes

    def watched(*args: Any) -> list[bytes]:
        threads.append(threading.current_thread() is threading.main_thread())
        return hashes(*args)

    monkeypatch.setattr(prompts, "prefix_hashes", watched)
    async with running(tmp_path) as r:
        await join(r.control, "a")
        # Two that hash alike: once for both.
        await r.control.report("a", a_report(of=(NAMESPACE, a_namespace(dtype="fp8"))))
        await r.control.lookup(by_model([1] * 16_384))
        await r.control.lookup(by_model([1] * 16_385))
    assert threads == [True, False]


async def test_an_answer_gives_so_many_keys_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "_MOST_RETURNED", 7)
    async with running(tmp_path) as r:
        for node, many in (("a", 4), ("b", 3), ("c", 1)):
            await join(r.control, node)
            await r.control.report(node, a_report(host(hexes(NAMESPACE, *range(many)))))
        asked = by_model()
        asked.return_keys = True
        reply = await r.control.lookup(asked)
        assert [len(n.keys or ()) for n in reply.nodes] == [4, 3, 0]
        assert reply.nodes[2].keys is None


@pytest.mark.parametrize(
    "lookups",
    [
        test_as_by_the_keys_that_the_tokens_have,
        test_each_namespace_of_a_model_counts_by_itself,
        test_a_model_with_states,
        test_a_model_with_windows_of_several_sizes,
        test_as_msgpack,
    ],
)
async def test_what_takes_long_is_done_in_steps_and_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookups: Any
) -> None:
    """All of it, and with the same answers."""
    monkeypatch.setattr(apart, "_MUCH", 0)
    monkeypatch.setattr(index, "_FOUND", 1)
    monkeypatch.setattr(index, "_MOST_HOLDERS", 1)
    threads = set()
    reusable = lookup.reusable

    def watched(*args: Any) -> Any:
        threads.add(threading.current_thread() is threading.main_thread())
        return reusable(*args)

    monkeypatch.setattr(lookup, "reusable", watched)
    await lookups(tmp_path)
    assert True not in threads


@pytest.mark.parametrize("forgotten", range(3))
async def test_a_node_may_be_forgotten_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgotten: int
) -> None:
    monkeypatch.setattr(index, "_FOUND", 1)
    async with running(tmp_path) as r:
        for node in "ab":
            await join(r.control, node)
            await r.control.report(node, a_report(host(hexes(NAMESPACE, 0, 1))))
        asked = api.LookupRequest(keys=hexes(NAMESPACE, 0, 1))
        state = r.state
        reading = asyncio.create_task(
            lookup.look_up(state.cluster, state.metrics, state.hot, asked)
        )
        for _ in range(forgotten):
            await asyncio.sleep(0)
        assert not reading.done()
        state.cluster.forget("a")
        assert [(n.node, n.prefix) for n in (await reading).nodes] == [("b", 2)]


async def test_a_prompt_has_so_many_chunks_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "MOST_CHUNKS", 12)
    smaller = a_namespace(dtype="fp8", blocks_per_chunk=1)
    async with running(tmp_path) as r:
        await join(r.control, "a")
        keys = host([*hexes(NAMESPACE, 0), *hexes(smaller, 0)])
        await r.control.report("a", a_report(keys, of=(NAMESPACE, smaller)))
        reply = await r.control.lookup(by_model())
        assert [n.namespace for n in reply.nodes] == [NAMESPACE.digest.hex()]
        assert reply.keys == 5
        assert "are 10 chunks" in reply.refused[smaller.digest.hex()]
        assert (await r.control.lookup(by_digest(smaller))).nodes[0].tokens == 4
        monkeypatch.setattr(prompts, "MOST_CHUNKS", 4)
        for asked in (by_model(), by_digest(NAMESPACE), by_digest(smaller)):
            with pytest.raises(Malformed, match="ask about fewer tokens"):
                await r.control.lookup(asked)


async def test_a_namespace_with_too_many_groups_is_refused(tmp_path: Path) -> None:
    [group] = NAMESPACE.groups
    many = tuple(msgspec.structs.replace(group, id=n) for n in range(MAX_GROUPS + 1))
    async with running(tmp_path) as r:
        await join(r.control, "a")
        wrong = a_report(host(hexes(NAMESPACE, 0)), of=(a_namespace(groups=many),))
        with pytest.raises(Malformed, match="129 groups, and at most 128"):
            await r.control.report("a", wrong)
        assert (await r.control.namespaces()).namespaces == []
    # One that an earlier version took doesn't keep the server from starting.
    known = Namespaces()
    known.load(NAMESPACE.digest, a_namespace(groups=many).document)
    assert known.get(NAMESPACE.digest) is None
