import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from replicas_kit import two, until
from server_kit import CHUNK_BYTES, NAMESPACE, host, join, keys, report, running, store

from kvstrata import api
from kvstrata.control import ControlPlane
from kvstrata.errors import Busy, Malformed, Missing, PeerRefused
from kvstrata.testing.waiting import until as waited
from kvstrata_server.access import tokens
from kvstrata_server.access.roles import Role
from kvstrata_server.tenancy import quotas as quotas_module
from kvstrata_server.tenancy import tenants
from kvstrata_server.tenancy.quotas import Quota

FULL = api.QuotaRequest(max_bytes=1 << 40, max_transfers=3, max_transfer_bytes=1 << 30)


def of(tenant):
    """A namespace of a tenant, and some of its keys."""
    namespace = replace(NAMESPACE, tenant=tenant)
    return namespace, [namespace.key(0, bytes([n]) * 8).hex() for n in range(8)]


async def hold(r, tenant, count, seq=0, node="a", location="host"):
    namespace, names = of(tenant)
    change = api.Change(location=location, added=names[:count], removed=[])
    document = namespace.document.decode()
    await r.control.report(node, report(seq, change, namespaces=(document,)))


async def test_set_read_list_and_deleted(place):
    async with running(place) as r:
        made = await r.control.put_quota("acme", FULL)
        assert (made.tenant, made.changed) == ("acme", r.clock())
        assert (made.max_bytes, made.max_transfers, made.max_transfer_bytes) == (
            1 << 40,
            3,
            1 << 30,
        )
        assert (made.use.bytes, made.use.transfers, made.eviction) == (0, 0, None)
        await r.control.put_quota("default", api.QuotaRequest(max_bytes=0))
        clock = r.clock
    async with running(place, clock) as r:
        assert (await r.control.quota("acme")).max_bytes == 1 << 40
        changed = await r.control.put_quota("acme", api.QuotaRequest(max_transfers=1))
        assert (changed.max_bytes, changed.max_transfers) == (None, 1)
        assert changed.changed > made.changed  # though the clock stood still
        listed = (await r.control.quotas()).quotas
        assert [(q.tenant, q.max_bytes) for q in listed] == [("acme", None), ("default", 0)]
        gone = await r.control.delete_quota("acme")
        assert (gone.changed, gone.max_transfers) == (None, None)
        for act in (r.control.quota, r.control.delete_quota):
            with pytest.raises(Missing, match="'acme' has no quota"):
                await act("acme")
        clock = r.clock
    async with running(place, clock) as r:
        assert [q.tenant for q in (await r.control.quotas()).quotas] == ["default"]


async def test_with_what_is_held_and_how_old_that_is(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a", stores=("sa",))
        await r.control.report("a", report(0, host(keys(0, 1)), store("sa", keys(1))))
        await hold(r, "acme", 2, 1, location="sa")
        await r.state.usage.refresh()
        r.clock.advance(3)
        default, acme = (await r.control.quotas()).quotas[::-1]
        assert (acme.tenant, acme.changed, acme.use.age) == ("acme", None, 3)
        assert acme.use.tiers == {"fs": 2 * CHUNK_BYTES}
        assert (default.tenant, default.use.chunks) == ("default", 3)
        assert default.use.tiers == {"host": 2 * CHUNK_BYTES, "fs": CHUNK_BYTES}
        assert (await r.control.quota("acme")).use == acme.use


@given(st.text(min_size=1) | st.sampled_from(["", "default", "~", ".", "~default"]))
def test_every_tenant_has_a_name_of_its_own(tenant):
    name = api.tenant_name(tenant)
    assert name
    assert api.tenant_from_name(name) == tenant
    assert name not in (".", "..")  # which clients take for folders


async def test_a_tenant_is_named_in_a_path_whatever_it_is_called(tmp_path):
    names = {"": "default", "default": "~default", "..": "~..", "a/b c?": "a/b c?", "ü%2F": "ü%2F"}
    async with running(tmp_path) as r:
        await join(r.control, "a")
        for seq, tenant in enumerate(names):
            await hold(r, tenant, seq + 1, seq)
        await r.state.usage.refresh()
        for seq, (tenant, name) in enumerate(names.items()):
            assert (await r.control.put_quota(name, FULL)).tenant == name
            assert r.state.quotas.get(tenant) is not None
            found = await r.control.quota(name)
            assert (found.tenant, found.use.chunks) == (name, seq + 1)
        assert [q.tenant for q in (await r.control.quotas()).quotas] == sorted(names.values())
        for name in names.values():
            await r.control.delete_quota(name)


async def test_a_name_that_cannot_be_asked_for_is_not_listed(tmp_path):
    async with running(tmp_path) as r:
        await join(r.control, "a")
        for seq, tenant in enumerate(("x" * 256, "tab\t", "x" * 255)):
            await hold(r, tenant, 1, seq)
        await r.state.usage.refresh()
        assert [q.tenant for q in (await r.control.quotas()).quotas] == ["x" * 255]
        for name in ("x" * 256, "tab\t"):
            with pytest.raises(Malformed):
                await r.control.put_quota(name, FULL)


async def test_bounds_are_numbers_that_can_be(tmp_path):
    async with running(tmp_path) as r:
        for body in (
            {"max_bytes": -1},
            {"max_bytes": True},
            {"max_bytes": "1"},
            {"max_bytes": (1 << 53) + 1},
            {"max_transfers": 0},
            {"max_transfer_bytes": 0},
            {"max_chunks": 1},
        ):
            answer = await r.http.put("/v1/quotas/acme", json=body)
            assert answer.status_code == 422, body
        assert r.state.quotas.all() == []


async def test_pages(tmp_path):
    async with running(tmp_path) as r:
        for name in ("b", "a", "c"):
            await r.control.put_quota(name, FULL)
        first = await r.control.quotas(limit=2)
        assert ([q.tenant for q in first.quotas], first.next) == (["a", "b"], "b")
        rest = await r.control.quotas(first.next, 2)
        assert ([q.tenant for q in rest.quotas], rest.next) == (["c"], None)


async def test_there_are_not_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas_module, "MOST_QUOTAS", 1)
    async with running(tmp_path) as r:
        await r.control.put_quota("a", FULL)
        await r.control.put_quota("a", api.QuotaRequest())
        with pytest.raises(Exception, match="delete those that nobody needs"):
            await r.control.put_quota("b", FULL)


async def test_a_tenant_sees_its_own_and_admins_write(tmp_path):
    async with running(tmp_path, token="root") as r:
        await r.control.put_quota("acme", FULL)
        await r.control.put_quota("other", FULL)
        made = {
            name: await tokens.create(r.state.database, name, role, 0.0, tenants)
            for name, role, tenants in (
                ("acme's", Role.ORCHESTRATE, ["acme"]),
                ("router", Role.ORCHESTRATE, None),
            )
        }
        await r.state.tokens.refresh()
        transport = r.http._transport
        async with (
            ControlPlane("http://test", made["acme's"], transport=transport) as own,
            ControlPlane("http://test", made["router"], transport=transport) as router,
        ):
            assert [q.tenant for q in (await own.quotas()).quotas] == ["acme"]
            assert (await own.quota("acme")).max_transfers == 3
            for name in ("other", "nobody"):
                with pytest.raises(PeerRefused, match="for other tenants"):
                    await own.quota(name)
            assert len((await router.quotas()).quotas) == 2
            for who in (own, router):
                with pytest.raises(PeerRefused):
                    await who.put_quota("acme", api.QuotaRequest())
                with pytest.raises(PeerRefused):
                    await who.delete_quota("acme")
        assert (await r.control.quota("acme")).max_bytes == 1 << 40
        await r.control.delete_quota("other")
        await r.state.writer.flushed(5)
        headers = {"Authorization": "Bearer root"}
        entries = (await r.http.get("/v1/audit", headers=headers)).json()["entries"]
        acts = [(e["actor"], e["operation"], e["subject"], e["status"]) for e in entries]
        assert acts.count(("settings", "put_quota", "/v1/quotas/acme", 200)) == 1
        assert ("acme's", "put_quota", "/v1/quotas/acme", 403) in acts
        assert ("settings", "delete_quota", "/v1/quotas/other", 200) in acts


async def test_servers_of_one_database_agree(postgres_address):
    async with two(postgres_address) as (first, second):
        await first.control.put_quota("acme", FULL)
        await first.control.put_quota("gone", FULL)

        async def known():
            return second.state.quotas.get("gone") is not None

        await until(known, 2)
        assert (await second.control.quota("acme")).max_bytes == 1 << 40
        await second.control.put_quota("acme", api.QuotaRequest(max_bytes=7))
        await second.control.delete_quota("gone")
        await first.state.quotas.load()
        assert first.state.quotas.all() == [
            Quota("acme", max_bytes=7, changed=second.state.quotas.all()[0].changed)
        ]


async def test_metrics_name_so_many_tenants_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr(tenants, "_MOST_MEASURED", 2)
    async with running(tmp_path) as r:
        await join(r.control, "a")
        for seq, (tenant, count) in enumerate({"few": 1, "": 3, "more": 2, "most": 4}.items()):
            await hold(r, tenant, count, seq)
        await r.control.put_quota("few", api.QuotaRequest(max_bytes=99))
        await r.state.usage.refresh()
        shown = [
            line
            for line in r.state.measure().decode().splitlines()
            if line.startswith("kvstrata_tenant")
        ]
        assert shown == [
            f'kvstrata_tenant_bytes{{tenant="few"}} {1.0 * CHUNK_BYTES}',
            f'kvstrata_tenant_bytes{{tenant="most"}} {4.0 * CHUNK_BYTES}',
            f'kvstrata_tenant_bytes{{tenant="~others"}} {5.0 * CHUNK_BYTES}',
            'kvstrata_tenant_quota_bytes{tenant="few"} 99.0',
        ]


async def test_it_reads_on_while_the_database_is_away(tmp_path, monkeypatch):
    monkeypatch.setattr(quotas_module, "_REFRESH", 0.001)
    async with running(tmp_path) as r:
        await r.control.put_quota("acme", FULL)
        failures = [Busy("the database did not answer in 5 seconds"), OSError("reset")]
        asked = []

        async def away(statement):
            asked.append(statement)
            raise failures[len(asked) % 2]

        with monkeypatch.context() as patch:
            patch.setattr(r.state.database, "rows", away)
            reading = asyncio.create_task(r.state.quotas.run())
            await waited(lambda: len(asked) > 4 or reading.done())
            assert not reading.done()
            reading.cancel()
        assert r.state.quotas.get("acme").max_transfers == 3
