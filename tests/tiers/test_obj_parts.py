"""The obj tier's parts, without a store: names and metadata, retries, pace, health, index."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.backoff import Backoff
from kvstrata.errors import ConfigError, Corrupt, Missing
from kvstrata.keys import Key, make_key
from kvstrata.testing import FakeClock
from kvstrata.testing.waiting import until
from kvstrata.tiers.base import Item
from kvstrata.tiers.calls import Call, Calls
from kvstrata.tiers.drops import Drops
from kvstrata.tiers.obj_conditions import Condition, Fault
from kvstrata.tiers.obj_format import Header, Names, StoreIdentity
from kvstrata.tiers.obj_health import Health
from kvstrata.tiers.obj_index import Index, Listed
from kvstrata.tiers.obj_options import ObjOptions
from kvstrata.tiers.obj_pace import Retry, TokenBucket

KEYS = st.builds(
    make_key,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**32 - 1),
    st.binary(min_size=1, max_size=32),
)


def key(i: int) -> Key:
    return make_key(bytes(16), 0, i.to_bytes(4, "big"))


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "bucket: this must be set"),
        ({"bucket": "kv-cache", "secret_key": "x"}, "secret_key: there is no such setting"),
        ({"bucket": "kv-cache", "prefix": "a//b"}, "prefix: has an empty"),
        ({"bucket": "kv-cache", "endpoint": "minio:9000"}, "endpoint"),
        ({"bucket": "kv-cache", "part_size": "1MiB"}, "part_size"),
        ({"bucket": "kv-cache", "eviction": "lifecycle", "capacity": "1GiB"}, "`capacity` needs"),
        ({"bucket": "kv-cache", "low_watermark": 0.9, "high_watermark": 0.8}, "low_watermark"),
    ],
)
def test_options_that_cannot_work(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ObjOptions.parse(options)


def test_credentials_in_the_endpoint_are_refused_and_not_told() -> None:
    with pytest.raises(ConfigError, match="endpoint: has a user or password") as e:
        ObjOptions.parse({"bucket": "kv-cache", "endpoint": "https://me:hunter2@minio:9000"})
    assert "hunter2" not in str(e.value)


@pytest.mark.parametrize("prefix", ["a/b", "/a/b", "a/b/", "//a/b//"])
def test_slashes_around_a_prefix_mean_nothing(prefix: str) -> None:
    assert ObjOptions.parse({"bucket": "kv-cache", "prefix": prefix}).prefix == "a/b"


# ---------------------------------------------------------------- names and metadata


@given(KEYS, st.sampled_from(["", "kv", "a/b"]))
def test_names_lead_back_to_keys(k: Key, prefix: str) -> None:
    names = Names(prefix)
    assert names.key(names.chunk(k)) == k
    assert names.chunk(k).startswith(names.root)


def test_a_name_is_that_of_the_fs_tiers_file() -> None:
    k = make_key(bytes(range(16)), 7, b"\xab\xcd\xef")
    assert Names("kv").chunk(k) == "kv/000102030405060708090a0b0c0d0e0f/ab/cd/abcdef.7.kv"


@pytest.mark.parametrize(
    "name",
    [
        "kv/store.json",
        "kv/kvstrata-quarantine/07",
        "kv/000102030405060708090a0b0c0d0e0f/namespace.json",
        "kv/000102030405060708090a0b0c0d0e0f/ab/ce/abcdef.7.kv",
        "kv/000102030405060708090a0b0c0d0e0f/ab/cd/abcdef.07.kv",
        "kv/000102030405060708090a0b0c0d0e0f/ab/cd/abcdef.4294967296.kv",
        "kv/000102030405060708090a0b0c0d0e0f/ab/cd/ABCDEF.7.kv",
        "kv/x/000102030405060708090a0b0c0d0e0f/ab/cd/abcdef.7.kv",
    ],
)
def test_other_names_are_no_chunks(name: str) -> None:
    assert Names("kv").key(name) is None


@given(KEYS, st.integers(0, 2**34), st.integers(0, 2**64 - 1))
def test_metadata_lead_back_to_headers(k: Key, nbytes: int, checksum: int) -> None:
    header = Header(k, nbytes, checksum)
    assert Header.parse(header.metadata()) == header
    assert all(value.isascii() for value in header.metadata().values())


def test_any_flipped_bit_of_metadata_is_seen() -> None:
    """It is refused, or says another key, length or checksum than the object has."""
    header = Header(key(77), 123_456, 0x0123456789ABCDEF)
    for name, value in header.metadata().items():
        for at in range(len(value)):
            for bit in range(7):
                flipped = value[:at] + chr(ord(value[at]) ^ 1 << bit) + value[at + 1 :]
                with contextlib.suppress(Corrupt):
                    assert Header.parse(header.metadata() | {name: flipped}) != header


@pytest.mark.parametrize("name", list(Header(key(0), 1, 2).metadata()))
def test_metadata_that_lack_a_part(name: str) -> None:
    metadata = Header(key(0), 1, 2).metadata()
    del metadata[name]
    with pytest.raises(Corrupt):
        Header.parse(metadata)


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"id": 1}', b'{"id": "6ff1bd3c-0d43-4ac7-9d5b-1d8a3ac3a9b1", "format": 2}'],
)
def test_a_document_that_identifies_no_store(content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"kv/store\.json"):
        StoreIdentity.parse("kv/store.json", content)


# ---------------------------------------------------------------- pace


class Sleeps:
    """Stands where `asyncio.sleep` would; moves the clock."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)


async def test_bytes_pass_at_the_rate() -> None:
    clock = FakeClock()
    sleeps = Sleeps(clock)
    bucket = TokenBucket(1000, clock, sleeps)
    for _ in range(20):
        await bucket.take(500)
    assert clock() == pytest.approx(20 * 500 / 1000)
    clock.advance(60)
    await bucket.take(100)  # a pause saves up a tenth of a second, not a minute
    await bucket.take(1000)
    assert sleeps.slept[-1] == pytest.approx(1.0)


async def test_no_rate_no_wait() -> None:
    await TokenBucket(None).take(1 << 40)


def failing(times: int, fault: Exception) -> Callable[[], Any]:
    """A request that fails so often, then is answered."""
    left = [times]

    async def request() -> str:
        if left[0]:
            left[0] -= 1
            raise fault
        return "answer"

    return request


SLOW = Fault(Condition.SLOW_DOWN, "", again=True)


async def test_waits_have_full_jitter_and_double() -> None:
    clock = FakeClock()
    sleeps = Sleeps(clock)
    draws = iter([1.0, 0.5, 0.0, 1.0, 1.0])
    retry = Retry(8, base=0.1, cap=1.0, rand=lambda: next(draws), sleep=sleeps)
    assert await retry.run(Call(clock, 100.0), failing(5, SLOW)) == "answer"
    assert sleeps.slept == pytest.approx([0.1, 0.1, 0.0, 0.8, 1.0])
    assert retry.retries == 5


@pytest.mark.parametrize("times", [4, 5])
async def test_tries_are_bounded(times: int) -> None:
    clock = FakeClock()
    retry = Retry(5, sleep=Sleeps(clock))
    request = retry.run(Call(clock, 100.0), failing(times, SLOW))
    if times < 5:
        assert await request == "answer"
    else:
        with pytest.raises(Fault, match="slow down"):
            await request


async def test_no_try_past_the_deadline() -> None:
    clock = FakeClock()
    sleeps = Sleeps(clock)
    retry = Retry(20, base=1.0, cap=1.0, rand=lambda: 1.0, sleep=sleeps)
    with pytest.raises(Fault, match="no time to try again after asked to slow down") as e:
        await retry.run(Call(clock, 3.5), failing(10, SLOW))
    assert e.value.condition is Condition.TIMEOUT
    assert clock() == 3.0


@pytest.mark.parametrize("error", [Missing("x"), Fault(Condition.DENIED, "x"), ValueError("bug")])
async def test_what_no_repetition_helps_is_told_at_once(error: Exception) -> None:
    clock = FakeClock()
    retry = Retry(5, sleep=Sleeps(clock))
    with pytest.raises(type(error)):
        await retry.run(Call(clock, 100.0), failing(1, error))
    assert retry.retries == 0


# ---------------------------------------------------------------- health


class Store:
    """Something to probe: fails while `fault` is set."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.probed = 0

    async def probe(self) -> None:
        self.probed += 1
        if self.fault is not None:
            raise self.fault


def health_of(store: Store) -> tuple[Health, list[float], asyncio.Event]:
    """With the waits between probes, each of which lasts until the event is set."""
    slept: list[float] = []
    go_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await go_on.wait()
        go_on.clear()

    return Health(store.probe, Backoff(1.0, 30.0, rand=lambda: 1.0), sleep), slept, go_on


@pytest.mark.parametrize(
    "condition", [Condition.UNREACHABLE, Condition.DENIED, Condition.NO_BUCKET]
)
async def test_a_store_that_is_away_is_left_alone_until_a_probe_succeeds(
    condition: Condition,
) -> None:
    store = Store()
    health, slept, go_on = health_of(store)
    store.fault = Fault(condition, "why")
    health.failed(store.fault)
    assert not health.well
    assert health.detail == f"{condition}: why"
    for probes in (1, 2, 3):
        go_on.set()
        await until(lambda n=probes: store.probed == n and len(slept) == n + 1)
        assert not health.well
    assert slept == [1.0, 2.0, 4.0, 8.0]
    store.fault = None
    go_on.set()
    await until(lambda: health.well)
    assert health.detail == ""
    await health.close()


async def test_an_overloaded_store_is_left_alone_after_three_failures_in_a_row() -> None:
    health, _, _ = health_of(Store())
    health.failed(SLOW)
    health.failed(SLOW)
    health.succeeded()
    health.failed(SLOW)
    health.failed(SLOW)
    assert health.well
    health.failed(SLOW)
    assert not health.well
    await health.close()


async def test_a_refused_request_says_nothing_of_the_store() -> None:
    health, _, _ = health_of(Store())
    for _ in range(10):
        health.failed(Fault(Condition.REFUSED, "bad"))
        health.failed(Fault(Condition.FULL, "quota"))
    assert health.well


async def test_a_probe_that_meets_a_bug_tries_again() -> None:
    health, _, go_on = health_of(store := Store())
    store.fault = ValueError("bug")  # type: ignore[assignment]
    health.failed(Fault(Condition.UNREACHABLE, ""))
    go_on.set()
    await until(lambda: health.detail == "probe: bug")
    store.fault = None
    go_on.set()
    await until(lambda: health.well)


# ---------------------------------------------------------------- index


def an_index(clock: FakeClock, exclusive: bool = False) -> Index:
    drops = Drops(Calls("obj", clock, 30.0))
    return Index(clock, known_for=600.0, missing_for=10.0, exclusive=exclusive, drops=drops)


def test_knowledge_ends() -> None:
    clock = FakeClock()
    index = an_index(clock)
    assert index.there(key(1)) is None
    index.hold([(key(1), 100)])
    assert index.there(key(1)) is True
    clock.advance(601)
    assert index.there(key(1)) is None
    assert key(1) in index
    index.drop(key(1))
    assert index.there(key(1)) is False
    clock.advance(11)
    assert index.there(key(1)) is None


def test_an_exclusive_index_knows_what_it_lacks_once_it_is_complete() -> None:
    index = an_index(FakeClock(), exclusive=True)
    assert index.there(key(1)) is None
    index.complete = True
    assert index.there(key(1)) is False


def test_bytes_add_up() -> None:
    index = an_index(FakeClock())
    index.hold([(key(1), 100), (key(2), 50)])
    index.hold([(key(1), 120)])
    assert (index.used_bytes, len(index)) == (170, 2)
    assert index.drop(key(1))
    assert not index.drop(key(1))
    assert (index.used_bytes, len(index)) == (50, 1)


def test_a_chain_is_given_up_from_its_tail() -> None:
    index = an_index(FakeClock())
    blank = memoryview(b"")
    index.learn([Item(key(i), blank, parent=key(i - 1) if i else None) for i in range(4)])
    for i in range(4):  # one by one, as requests grow
        index.hold([(key(i), 10)])
    index.hold([(key(9), 10)])
    index.touch([key(3)])
    assert index.oldest(1000, keep=()) == [key(9), key(3), key(2), key(1), key(0)]
    assert index.keys() == index.oldest(1000, keep=())
    assert index.oldest(25, keep={key(9)}) == [key(3), key(2), key(1)]


def list_all(index: Index, *pages: list[Listed]) -> list[Key]:
    index.begin_listing()
    for page in pages:
        index.list_page(page)
    gone = index.drop_unlisted(index.keys())
    index.end_listing()
    return gone


def test_a_listing_adds_and_drops() -> None:
    index = an_index(FakeClock())
    index.hold([(key(1), 100), (key(2), 100)])
    gone = list_all(index, [Listed(key(2), 100, 5.0)], [Listed(key(3), 70, 9.0)])
    assert gone == [key(1)]
    assert index.keys() == [key(3), key(2)]  # what is only listed is the least used
    assert index.used_bytes == 170


def test_what_happens_during_a_listing_is_newer_than_it() -> None:
    index = an_index(FakeClock())
    index.hold([(key(1), 100), (key(2), 100)])
    index.begin_listing()
    index.hold([(key(3), 30)])  # stored after its page was made
    index.drop(key(1))  # evicted after that
    index.list_page([Listed(key(1), 100, 1.0), Listed(key(2), 100, 1.0)])
    assert index.drop_unlisted(index.keys()) == []
    index.end_listing()
    assert set(index.keys()) == {key(2), key(3)}
    assert index.there(key(1)) is False


def test_a_listing_that_ends_early_drops_nothing() -> None:
    index = an_index(FakeClock())
    index.hold([(key(1), 100)])
    index.begin_listing()
    index.end_listing()
    assert list_all(index, [Listed(key(1), 100, 1.0)]) == []
