"""The scheduler's half against a node that can lag, refuse, die and come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm_fakes import CHUNK, NAMESPACE, TTL, Clock, FakeNode

from kvstrata.errors import Expired
from kvstrata.keys import Namespace
from kvstrata_adapters.engines.vllm.faults import FaultLine, report_fault
from kvstrata_adapters.engines.vllm.link import NodeLink
from kvstrata_adapters.engines.vllm.manager import KVStrataManager
from kvstrata_adapters.engines.vllm.naming import Naming

pytestmark = pytest.mark.vllm

HIT, MISS = LookupResult.HIT, LookupResult.MISS
RETRY, HIT_PENDING = LookupResult.RETRY, LookupResult.HIT_PENDING
END = ScheduleEndContext((), ())
NAMING = Naming(NAMESPACE)


def keys(*numbers: int) -> list[bytes]:
    return [make_offload_key(n.to_bytes(32, "big"), 0) for n in numbers]


def context(name: str, *numbers: int) -> ReqContext:
    made = ReqContext(name)
    for i, key in enumerate(keys(*numbers)):
        made.set_offload_key_position(key, (i + 1) * 16)
    return made


class Engine:
    """A manager, and what vLLM would do with it."""

    def __init__(
        self, node: FakeNode, clock: Clock, faults: Path, namespace: Namespace = NAMESPACE
    ) -> None:
        self.node = node
        self.faults = FaultLine(faults)
        self.link = NodeLink(node.connect(), node.connect, clock)
        self.manager = KVStrataManager(self.link, namespace, self.faults, 10.0, 64, clock)

    def slots_held(self) -> int:
        return self.manager._pool.free(CHUNK)

    def step(self) -> None:
        self.manager.on_schedule_end(END)

    def look(self, request: ReqContext, *numbers: int) -> list[LookupResult]:
        return [self.manager.lookup(key, request) for key in keys(*numbers)]

    def find(self, request: ReqContext, *numbers: int) -> list[LookupResult]:
        """The answer once the node has been asked."""
        self.look(request, *numbers)
        self.step()
        return self.look(request, *numbers)

    def store(self, request: ReqContext, *numbers: int) -> list[bytes]:
        """Store and complete; what was stored."""
        out = self.manager.prepare_store(keys(*numbers), request)
        assert out is not None
        for name, offset in zip(out.store_spec.keys, out.store_spec.offsets, strict=True):
            self.node.memory[int(offset)] = name
        self.step()
        self.manager.complete_store(set(out.keys_to_store), request)
        self.step()
        return out.keys_to_store


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> FakeNode:
    return FakeNode(clock, chunks=32)


@pytest.fixture
def engine(node: FakeNode, clock: Clock, tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(node, clock, tmp_path / "f")
    yield engine
    engine.manager.shutdown()


def test_what_was_stored_is_found_with_one_message_for_all_keys(
    engine: Engine, node: FakeNode
) -> None:
    first = context("a", 1, 2, 3)
    assert engine.store(first, 1, 2, 3) == keys(1, 2, 3)
    engine.manager.on_request_finished(first)
    engine.step()
    node.steps.clear()

    second = context("b", 1, 2, 3, 4)
    assert engine.look(second, 1) == [RETRY]
    assert engine.look(second, 2, 3, 4) == [RETRY] * 3
    engine.step()
    assert engine.look(second, 1, 2, 3, 4) == [HIT, HIT, HIT, MISS]
    (asked,) = [ask for step in node.steps for ask in step.lookups]
    assert asked.keys == [NAMING.ours(k) for k in keys(1, 2, 3, 4)]
    assert asked.want == "prefix"
    engine.step()
    assert len(node.steps) == 1


def test_chunks_that_the_device_has_are_not_asked_for(engine: Engine, node: FakeNode) -> None:
    assert engine.look(context("a", 1, 2, 3, 4), 3) == [RETRY]
    engine.step()
    asked = [ask for step in node.steps for ask in step.lookups]
    assert [ask.keys for ask in asked] == [[NAMING.ours(k) for k in keys(3, 4)]]


def test_a_load_names_the_bytes_and_gives_its_lease_back(engine: Engine, node: FakeNode) -> None:
    engine.store(context("a", 1, 2), 1, 2)
    request = context("b", 1, 2)
    assert engine.find(request, 1, 2) == [HIT, HIT]
    spec = engine.manager.prepare_load(keys(1, 2), request)
    assert [node.memory[int(o)] for o in spec.offsets] == [NAMING.ours(k) for k in keys(1, 2)]
    assert (spec.region, spec.region_bytes) == ("kvstrata-i0", 1 << 20)
    engine.step()
    assert node.host.drop() == 0
    engine.manager.complete_load(set(keys(1, 2)), request)
    engine.step()
    assert node.host.usage().leases == 0
    assert node.host.drop() == 2


def test_pending_chunks_are_waited_for(engine: Engine, node: FakeNode, clock: Clock) -> None:
    node.tier |= {NAMING.ours(k) for k in keys(1)}
    request = context("a", 1, 2)
    assert engine.find(request, 1, 2) == [HIT_PENDING, MISS]
    node.promote()
    engine.step()
    assert engine.look(request, 1) == [HIT]
    assert engine.manager.get_load_source(keys(1)[0], request).value == "external_unspecified"


def test_a_pending_chunk_that_does_not_come_in_time_is_a_miss(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    node.tier |= {NAMING.ours(k) for k in keys(1)}
    request = context("a", 1)
    assert engine.find(request, 1) == [HIT_PENDING]
    clock.now += 9.9
    assert engine.look(request, 1) == [HIT_PENDING]
    clock.now += 0.2
    assert engine.look(request, 1) == [MISS]


def test_a_node_that_says_nothing_holds_no_request_up(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    node.lagging = True
    request = context("a", 1)
    assert engine.find(request, 1) == [RETRY]
    clock.now += 5.1
    assert engine.look(request, 1) == [MISS]
    assert engine.look(context("b", 1), 1) == [MISS]
    assert not engine.manager.has_pending_work()
    node.lagging = False
    node.work()
    engine.step()
    assert engine.find(context("c", 1), 1) == [MISS]
    assert node.steps[-1].lookups


def test_the_lease_of_a_waiting_request_is_renewed(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    for _ in range(20):
        clock.now += TTL / 10
        assert engine.look(request, 1) == [HIT]
        engine.step()
    node.host.expire()
    assert node.host.drop() == 0


def test_a_lease_that_may_have_lapsed_is_not_relied_on(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    clock.now += TTL * 0.7
    assert engine.look(request, 1) == [RETRY]
    node.host.drop()
    engine.step()
    assert engine.look(request, 1) == [HIT]


def test_a_renewal_that_comes_too_late_is_no_renewal(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1, 2)
    assert engine.find(request, 1) == [HIT]
    clock.now += TTL / 2
    engine.look(request, 1)
    node.lagging = True
    engine.step()
    clock.now += TTL
    node.work()
    assert node.steps[-1].renews
    engine.step()
    assert engine.look(request, 1) == [RETRY]


def test_a_lease_extended_too_late_is_another_lease(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1, 2), 1, 2)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    request.set_offload_key_position(keys(2)[0], 32)
    clock.now += TTL / 2
    assert engine.look(request, 1, 2) == [HIT, RETRY]
    node.lagging = True
    engine.step()
    clock.now += TTL
    node.work()  # the lease has lapsed; the lookup of chunk 2 begins one that lacks chunk 1
    engine.step()
    assert engine.look(request, 1) == [RETRY]


def test_a_store_that_ends_within_its_step_is_still_committed(
    engine: Engine, node: FakeNode
) -> None:
    request = context("a", 1)
    out = engine.manager.prepare_store(keys(1), request)
    assert out is not None
    engine.manager.complete_store(set(out.keys_to_store), request)
    engine.step()
    assert node.host.usage().chunks == 1


def test_a_load_that_outlived_an_unconfirmed_lease_ends_the_engine(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    engine.manager.prepare_load(keys(1), request)
    node.lagging = True
    engine.step()
    clock.now += TTL + 1
    with pytest.raises(Expired, match="for longer than its lease"):
        engine.manager.complete_load(set(keys(1)), request)


def test_a_confirmed_load_may_take_long(engine: Engine, node: FakeNode, clock: Clock) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    engine.manager.prepare_load(keys(1), request)
    engine.step()
    clock.now += 10 * TTL
    node.host.expire()
    assert node.host.drop() == 0 or node.memory
    engine.manager.complete_load(set(keys(1)), request)


def test_a_store_that_another_engine_made_meanwhile_gives_its_slot_back(
    engine: Engine, node: FakeNode, clock: Clock, tmp_path: Path
) -> None:
    other = Engine(node, clock, tmp_path / "g")
    mine = engine.manager.prepare_store(keys(1), context("a", 1))
    assert mine is not None
    other.store(context("b", 1), 1)
    engine.step()
    used = node.host.usage().used
    engine.manager.complete_store(set(keys(1)), ReqContext("other"))
    assert not engine.link.draft.commits
    request = context("a2", 1)
    assert engine.manager.prepare_store(keys(1), request).keys_to_store == []
    other.manager.shutdown()
    assert node.host.usage().used <= used


def test_a_failed_store_is_aborted_not_committed(engine: Engine, node: FakeNode) -> None:
    request = context("a", 1, 2)
    out = engine.manager.prepare_store(keys(1, 2), request)
    assert out is not None
    engine.step()
    report_fault(out.store_spec.faults, out.store_spec.keys[:1])
    engine.manager.complete_store(set(keys(1, 2)), request)
    engine.step()
    assert engine.find(context("b", 2), 2) == [HIT]
    assert engine.find(context("c", 1), 1) == [MISS]
    # Once told it is over: the next store of that chunk counts.
    assert engine.store(context("d", 1), 1) == keys(1)
    assert engine.find(context("e", 1), 1) == [HIT]


def test_what_is_known_to_be_stored_is_not_stored_again_until_it_is_missed(
    engine: Engine, node: FakeNode
) -> None:
    assert engine.store(context("a", 1), 1) == keys(1)
    assert engine.store(context("b", 1), 1) == []
    node.host.drop()
    assert engine.store(context("c", 1), 1) == []
    assert engine.find(context("d", 1), 1) == [MISS]
    assert engine.store(context("e", 1), 1) == keys(1)


def test_without_enough_slots_a_store_is_put_off_once_then_made_in_part(
    engine: Engine, node: FakeNode
) -> None:
    request = context("a", *range(20))
    assert engine.manager.prepare_store(keys(*range(20)), request) is None
    engine.step()
    out = engine.manager.prepare_store(keys(*range(20)), request)
    assert out is not None
    assert out.keys_to_store == keys(*range(20))

    # The node has 32 slots, and the 20 are not given back.
    request = context("b", *range(100, 150))
    assert engine.manager.prepare_store(keys(*range(100, 150)), request) is None
    engine.step()
    out = engine.manager.prepare_store(keys(*range(100, 150)), request)
    assert out is not None
    assert out.keys_to_store == keys(*range(100, 112))


def test_a_store_waits_for_a_node_that_is_slow_to_grant_slots(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    many = range(20)
    request = context("a", *many)
    node.lagging = True
    for _ in range(40):  # steps of an engine whose node is kept from running for two seconds
        assert engine.manager.prepare_store(keys(*many), request) is None
        engine.step()
        clock.now += 0.05
    node.work()
    node.lagging = False
    engine.step()
    assert engine.store(request, *many) == keys(*many)
    assert node.host.usage().chunks == 20


def test_a_store_that_has_waited_long_enough_is_made_with_what_there_is(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    many = range(20)
    request = context("a", *many)
    node.lagging = True
    assert engine.manager.prepare_store(keys(*many), request) is None
    clock.now += 5.0
    out = engine.manager.prepare_store(keys(*many), request)
    assert out is not None
    assert out.keys_to_store == keys(*range(8))  # what was granted ahead


def test_a_full_node_is_asked_a_few_times_and_then_nothing_is_stored(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", *range(8)), *range(8))
    node.room = False
    many = range(100, 150)
    while engine.slots_held():
        engine.store(context("b", many[0]), many[0])
        many = many[1:]
    request, puts_off = context("c", *many), 0
    node.steps.clear()
    while (out := engine.manager.prepare_store(keys(*many), request)) is None:
        puts_off += 1
        engine.step()
        clock.now += 0.05
        assert puts_off < 10
    assert out.keys_to_store == []
    assert puts_off == 3
    assert len([step for step in node.steps if step.credits]) <= 4


def test_a_store_waits_for_the_welcome_of_a_node_that_came_back(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1), 1)
    node.die()
    engine.step()
    gone = context("b", 3)
    out = engine.manager.prepare_store(keys(3), gone)
    assert out is not None  # nobody is there: not worth waiting
    assert out.keys_to_store == []

    node.start()
    node.welcoming = False
    clock.now += 1
    engine.step()
    assert not engine.link.up
    request = context("c", *range(20))
    assert engine.look(request, 0) == [MISS]
    for _ in range(5):
        assert engine.manager.prepare_store(keys(*range(20)), request) is None
        engine.step()
    node.welcoming = True
    node.lagging = True
    for _ in range(5):
        engine.step()
        assert engine.link.up
        assert engine.manager.prepare_store(keys(*range(20)), request) is None
    node.work()
    node.lagging = False
    engine.step()
    assert engine.store(request, *range(20)) == keys(*range(20))


def test_a_node_that_came_back_is_asked_for_slots_in_the_step_that_finds_it(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    node.die()
    engine.step()
    node.start()
    clock.now += 1
    node.steps.clear()
    engine.step()
    assert engine.link.up
    assert node.steps[0].credits


@pytest.fixture
def states(clock: Clock, tmp_path: Path) -> Iterator[Engine]:
    """An engine whose only group is of Mamba states."""
    (group,) = NAMESPACE.groups
    group = msgspec.structs.replace(group, kind="mamba")
    namespace = msgspec.structs.replace(NAMESPACE, groups=(group,))
    engine = Engine(FakeNode(clock, 32, namespace), clock, tmp_path / "states", namespace)
    yield engine
    engine.manager.shutdown()


def test_stores_of_states_are_not_put_off_as_vllm_offers_them_once(states: Engine) -> None:
    out = states.manager.prepare_store(keys(*range(20)), context("a", *range(20)))
    assert out is not None
    assert 0 < len(out.keys_to_store) < 20
    assert out.keys_to_store == keys(*range(len(out.keys_to_store)))


def test_a_state_is_found_behind_missing_ones(states: Engine) -> None:
    states.node.tier.add(states.node.namespace.key(0, keys(3)[0][:-4]))
    assert states.find(context("a", 1, 2, 3), 1, 2, 3) == [MISS, MISS, HIT_PENDING]


def test_slots_are_granted_ahead_for_what_was_missed(engine: Engine, node: FakeNode) -> None:
    request = context("a", *range(20))
    assert engine.find(request, *range(20)) == [MISS] * 20
    engine.step()
    out = engine.manager.prepare_store(keys(*range(20)), request)
    assert out is not None
    assert len(out.keys_to_store) == 20


def test_an_idle_engine_has_nothing_to_do(engine: Engine, node: FakeNode) -> None:
    request = context("a", 1)
    engine.find(request, 1)
    out = engine.manager.prepare_store(keys(1), request)
    assert out is not None
    assert engine.manager.has_pending_work()
    engine.step()
    engine.manager.complete_store(set(out.keys_to_store), request)
    engine.manager.on_request_finished(request)
    assert engine.manager.has_pending_work()
    engine.step()
    assert not engine.manager.has_pending_work()
    assert node.host.usage().chunks == 1


def test_a_message_the_socket_can_not_take_goes_out_later(engine: Engine, node: FakeNode) -> None:
    engine.link._client.busy = True
    request = context("a", 1)
    engine.look(request, 1)
    engine.step()
    out = engine.manager.prepare_store(keys(1), request)
    assert out is not None
    engine.step()
    engine.manager.complete_store(set(out.keys_to_store), request)
    assert engine.manager.has_pending_work()
    engine.step()
    engine.link._client.busy = False
    engine.step()
    # Use before commit, though both had to wait.
    assert node.host.usage().chunks == 1


def test_the_engine_serves_on_while_its_node_is_gone_and_finds_it_again(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    request = context("a", 1, 2)
    engine.store(request, 1)
    out = engine.manager.prepare_store(keys(2), request)
    assert out is not None
    node.die()
    engine.step()
    assert engine.look(context("b", 1), 1) == [MISS]
    assert engine.manager.prepare_store(keys(3), context("b", 3)).keys_to_store == []
    assert not engine.manager.has_pending_work()

    node.start()
    clock.now += 1
    engine.step()
    engine.step()
    # Another request stores chunk 2 anew. The job of the old session ends only now; it must
    # not commit what the new job has not written yet.
    again = context("c", 2)
    newer = engine.manager.prepare_store(keys(2), again)
    assert newer is not None
    assert newer.store_spec.region == "kvstrata-i1"
    engine.step()
    engine.manager.complete_store(set(out.keys_to_store), request)
    engine.step()
    assert engine.find(context("d", 2), 2) == [HIT_PENDING]
    engine.manager.complete_store(set(newer.keys_to_store), again)
    engine.step()
    assert engine.find(context("e", 2), 2) == [HIT]


def test_reconnecting_is_tried_less_and_less_often(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    tries = 0
    reopen = engine.link._reopen

    def counted() -> object:
        nonlocal tries
        tries += 1
        return reopen()

    engine.link._reopen = counted
    node.die()
    for _ in range(600):
        engine.step()
        clock.now += 0.1
    assert 10 <= tries <= 20


def test_a_load_in_flight_when_the_node_dies_is_good(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    engine.manager.prepare_load(keys(1), request)
    node.die()
    engine.step()
    clock.now += 2 * TTL
    engine.manager.complete_load(set(keys(1)), request)
    engine.manager.on_request_finished(request)


def test_a_load_in_flight_when_the_session_is_refused_is_good_for_its_lease_only(
    engine: Engine, node: FakeNode, clock: Clock
) -> None:
    """The node lives, and may give the slots away once the lease is over."""
    engine.store(context("a", 1), 1)
    for outlived in (False, True):
        request = context(f"b{outlived}", 1)
        assert engine.find(request, 1) == [HIT]
        engine.manager.prepare_load(keys(1), request)
        node.refuse = "malformed"
        engine.step()
        assert not engine.link.up
        node.refuse = None
        if outlived:
            clock.now += 2 * TTL
            with pytest.raises(Expired):
                engine.manager.complete_load(set(keys(1)), request)
        else:
            engine.manager.complete_load(set(keys(1)), request)
            clock.now += 1
            engine.step()
            engine.step()
            engine.store(context("c", 1), 1)


def test_an_answer_that_is_lost_ends_the_session(engine: Engine, node: FakeNode) -> None:
    """A node drops what a peer does not read; what it granted there is nobody's."""
    node.lagging = True
    assert engine.find(context("a", 1), 1) == [RETRY]
    engine.step()
    node._queue.clear()  # handled, but the answer did not arrive
    node.lagging = False
    assert engine.find(context("b", 2), 2)
    engine.step()
    assert not engine.link.up


def test_a_refused_step_ends_the_session(engine: Engine, node: FakeNode, clock: Clock) -> None:
    node.refuse = "malformed"
    assert engine.find(context("a", 1), 1) == [MISS]
    assert not engine.link.up
    assert node.host.usage().granted == 0
    node.refuse = None
    clock.now += 1
    engine.step()
    engine.step()
    engine.store(context("b", 1), 1)
    assert engine.find(context("c", 1), 1) == [HIT]


def test_a_reset_forgets_and_gives_back_what_vllm_will_not_complete(
    engine: Engine, node: FakeNode
) -> None:
    engine.store(context("a", 1), 1)
    loading, storing = context("b", 1), context("c", 5)
    assert engine.find(loading, 1) == [HIT]
    engine.manager.prepare_load(keys(1), loading)
    assert engine.manager.prepare_store(keys(5), storing) is not None
    engine.step()
    engine.manager.reset_cache()
    assert engine.manager.has_pending_work()
    # Workers may still be writing: nobody may get that slot yet.
    engine.step()
    assert node.host.usage().writing == CHUNK
    assert node.host.drop() == 0
    for _ in range(4):
        engine.step()
    assert node.host.usage().writing == 0
    assert not engine.manager.has_pending_work()
    assert engine.find(context("d", 1), 1) == [HIT]
    assert engine.store(context("e", 5), 5) == keys(5)


def test_a_request_aborted_while_loading_ends_its_read_later(
    engine: Engine, node: FakeNode
) -> None:
    engine.store(context("a", 1), 1)
    request = context("b", 1)
    assert engine.find(request, 1) == [HIT]
    engine.manager.prepare_load(keys(1), request)
    engine.step()
    engine.manager.on_request_finished(request)
    engine.step()
    assert node.host.drop() == 0
    engine.manager.complete_load(set(keys(1)), request)
    engine.step()
    assert node.host.drop() == 1
    assert "b" not in engine.manager._lookups.requests


def test_a_missing_chunk_is_asked_for_again_while_the_request_waits(
    engine: Engine, clock: Clock
) -> None:
    request = context("a", 1)
    assert engine.find(request, 1) == [MISS]
    engine.store(context("b", 1), 1)
    assert engine.find(request, 1) == [MISS]
    clock.now += 2.5
    assert engine.look(request, 1) == [MISS]  # asked, but nothing is held up for it
    engine.step()
    assert engine.look(request, 1) == [HIT]
