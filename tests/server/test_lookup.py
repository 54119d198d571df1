from server_kit import host, join, keys, report, running, store

from kvstrata import api


async def filled(r) -> None:
    """a: host 0-3; b: host 0-1 and store 2-4; c: host 1-4."""
    for node in "abc":
        await join(r.control, node, stores=(f"s{node}",))
    await r.control.report("a", report(0, host(keys(0, 1, 2, 3))))
    r.clock.advance(1)
    await r.control.report("b", report(0, host(keys(0, 1)), store("sb", keys(2, 3, 4))))
    r.clock.advance(1)
    await r.control.report("c", report(0, host(keys(1, 2, 3, 4))))


async def test_prefix_over_any_mix_of_tiers_best_first(place):
    async with running(place) as r:
        await filled(r)
        reply = await r.control.lookup(api.LookupRequest(keys=keys(0, 1, 2, 3, 4, 5)))
        assert reply.keys == 6
        assert [(n.node, n.prefix) for n in reply.nodes] == [("b", 5), ("a", 4), ("c", 0)]
        b = reply.nodes[0]
        assert b.tiers == {
            "host": api.Tally(found=2, prefix=2, tokens=128),
            "fs": api.Tally(found=3, prefix=0, tokens=0),
        }
        assert [n.tokens for n in reply.nodes] == [5 * 64, 4 * 64, 0]
        assert [n.age for n in reply.nodes] == [1, 2, 0]
        assert b.keys is None


async def test_among_equals_host_memory_then_the_youngest(place):
    async with running(place) as r:
        await filled(r)
        reply = await r.control.lookup(api.LookupRequest(keys=keys(0, 1, 2)))
        assert [n.node for n in reply.nodes] == ["a", "b", "c"]
        reply = await r.control.lookup(api.LookupRequest(keys=keys(0, 1)))
        assert [n.node for n in reply.nodes] == ["b", "a", "c"]


async def test_all_says_which_keys_in_the_order_asked(place):
    async with running(place) as r:
        await filled(r)
        asked = keys(4, 9, 1)
        reply = await r.control.lookup(api.LookupRequest(keys=asked, mode="all"))
        assert {n.node: n.keys for n in reply.nodes} == {
            "b": keys(4, 1),
            "c": keys(4, 1),
            "a": keys(1),
        }
        assert reply.nodes[0].node == "c"  # both in host memory


async def test_only_the_nodes_asked_for(place):
    async with running(place) as r:
        await filled(r)
        reply = await r.control.lookup(api.LookupRequest(keys=keys(1), nodes=["c", "zz"]))
        assert [n.node for n in reply.nodes] == ["c"]


async def test_keys_may_be_upper_case_and_unknown_ones_are_no_error(place):
    async with running(place) as r:
        await filled(r)
        asked = [key.upper() for key in keys(0, 77)]
        reply = await r.control.lookup(api.LookupRequest(keys=asked))
        assert [(n.node, n.prefix) for n in reply.nodes] == [("b", 1), ("a", 1)]
