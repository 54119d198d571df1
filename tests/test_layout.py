"""The canonical page: bytes must not depend on how many ranks wrote them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.errors import Malformed
from kvstrata.keys import Field, Group
from kvstrata.layout import (
    CopyRun,
    FieldShare,
    LayerPlace,
    check_tiling,
    derive_runs,
    share_of,
)


def make_group(units: int, unit_bytes: int, layers: int) -> Group:
    return Group(
        id=0,
        kind="full",
        layers=tuple(f"l{i}" for i in range(layers)),
        fields=(Field("kv", units, unit_bytes),),
        tokens_per_block=4,
    )


def place(family: str, layer: int, heads: int, tokens: int, cell: int) -> LayerPlace:
    if family == "head-major":
        return LayerPlace(layer, 0, unit_stride=tokens * cell)
    return LayerPlace(layer, 0, unit_stride=cell, pieces=tokens, piece_stride=heads * cell)


def rank_runs(
    group: Group, family: str, rank: int, ranks: int, tokens: int, cell: int, write: bool
) -> tuple[CopyRun, ...]:
    units, layers = share_of(group.fields[0].units, len(group.layers), rank, ranks)
    layers = layers if write else range(len(group.layers))
    places = tuple(place(family, i, len(units), tokens, cell) for i in layers)
    share = FieldShare("kv", units.start, len(units), places, layers.start)
    row = len(units) * tokens * cell
    return derive_runs(group, [share], [row] * len(group.layers))


def to_page(runs: tuple[CopyRun, ...], rows: list[np.ndarray], page: np.ndarray) -> None:
    for run in runs:
        for i in range(run.count):
            d, p = run.device_offset + i * run.device_stride, run.page_offset + i * run.page_stride
            page[p : p + run.nbytes] = rows[run.cache][d : d + run.nbytes]


def from_page(runs: tuple[CopyRun, ...], rows: list[np.ndarray], page: np.ndarray) -> None:
    for run in runs:
        for i in range(run.count):
            d, p = run.device_offset + i * run.device_stride, run.page_offset + i * run.page_stride
            rows[run.cache][d : d + run.nbytes] = page[p : p + run.nbytes]


geometries = st.tuples(
    st.sampled_from([1, 2, 4, 6, 8]),  # KV heads
    st.integers(1, 5),  # tokens
    st.integers(1, 7),  # bytes of a token of a head
    st.integers(1, 4),  # layers
)


@given(geometries, st.data())
def test_what_some_ranks_stored_is_what_other_ranks_load(
    geometry: tuple[int, int, int, int], data: st.DataObject
) -> None:
    heads, tokens, cell, layers = geometry
    group = make_group(heads, tokens * cell, layers)
    possible = [n for n in (1, 2, 3, 4, 6, 8, 16) if heads % n == 0 or n % heads == 0]
    writers, readers = data.draw(st.sampled_from(possible)), data.draw(st.sampled_from(possible))
    families = st.sampled_from(["head-major", "token-major"])
    wrote, read = data.draw(families), data.draw(families)
    # Both families keep a unit's bytes in the order [tokens][cell], so they can read each other.
    truth = np.random.default_rng(0).integers(0, 256, (layers, heads, tokens, cell), dtype=np.uint8)

    def rows_of(family: str, rank: int, ranks: int) -> list[np.ndarray]:
        units, _ = share_of(heads, layers, rank, ranks)
        part = truth[:, units.start : units.stop]
        if family == "token-major":
            part = part.transpose(0, 2, 1, 3)
        return [np.ascontiguousarray(layer).reshape(-1) for layer in part]

    page = np.zeros(group.page_bytes, dtype=np.uint8)
    every = [rank_runs(group, wrote, r, writers, tokens, cell, write=True) for r in range(writers)]
    check_tiling(group, every)
    for rank, runs in enumerate(every):
        to_page(runs, rows_of(wrote, rank, writers), page)
    assert page.tobytes() == truth.transpose(1, 0, 2, 3).tobytes()

    for rank in range(readers):
        expected = rows_of(read, rank, readers)
        loaded = [np.zeros_like(row) for row in expected]
        runs = rank_runs(group, read, rank, readers, tokens, cell, write=False)
        from_page(runs, loaded, page)
        for got, want in zip(loaded, expected, strict=True):
            assert got.tobytes() == want.tobytes()


def test_head_major_layers_in_arrays_of_their_own_take_one_run_per_layer() -> None:
    group = make_group(units=4, unit_bytes=64, layers=2)
    runs = rank_runs(group, "head-major", 1, 2, tokens=8, cell=8, write=True)
    assert runs == (
        CopyRun(0, 0, 2 * 2 * 64, 64, count=2, device_stride=64, page_stride=128),
        CopyRun(1, 0, 2 * 2 * 64 + 64, 64, count=2, device_stride=64, page_stride=128),
    )


def test_rows_that_are_the_page_already_take_one_run() -> None:
    group = make_group(units=4, unit_bytes=64, layers=3)
    places = tuple(LayerPlace(0, layer * 64, unit_stride=3 * 64) for layer in range(3))
    (run,) = derive_runs(group, [FieldShare("kv", 2, 2, places)], [2 * 3 * 64])
    assert run == CopyRun(0, 0, 2 * 3 * 64, 2 * 3 * 64)


def test_fields_follow_each_other_in_the_page() -> None:
    group = Group(
        id=3,
        kind="mamba",
        layers=("a", "b"),
        fields=(Field("conv", 1, 10), Field("ssm", 2, 6)),
        tokens_per_block=4,
    )
    shares = [
        FieldShare("ssm", 0, 2, (LayerPlace(0, 10, 6), LayerPlace(1, 10, 6))),
        FieldShare("conv", 0, 1, (LayerPlace(0, 0, 10), LayerPlace(1, 0, 10))),
    ]
    runs = derive_runs(group, shares, [22, 22])
    check_tiling(group, [runs])
    assert [(r.cache, r.device_offset, r.page_offset, r.nbytes, r.count) for r in runs] == [
        (0, 0, 0, 10, 1),
        (1, 0, 10, 10, 1),
        (0, 10, 20, 6, 2),
        (1, 10, 26, 6, 2),
    ]


def test_replicas_split_the_layers_of_the_unit_they_share() -> None:
    assert [share_of(2, 3, rank, 4) for rank in range(4)] == [
        (range(0, 1), range(0, 1)),
        (range(0, 1), range(1, 3)),
        (range(1, 2), range(0, 1)),
        (range(1, 2), range(1, 3)),
    ]
    # More replicas than layers: some write nothing.
    assert [len(share_of(1, 1, rank, 3)[1]) for rank in range(3)] == [0, 0, 1]


def test_heads_that_can_not_be_shared_evenly_are_refused() -> None:
    with pytest.raises(Malformed, match="6 units can't be shared evenly by 4 ranks"):
        share_of(6, 1, 0, 4)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (FieldShare("kv", 2, 3, (LayerPlace(0, 0, 64),)), "units 2 to 5 of 4 don't exist"),
        (FieldShare("kv", 0, 0, (LayerPlace(0, 0, 64),)), "units 0 to 0 of 4"),
        (FieldShare("kv", 0, 4, (LayerPlace(0, 0, 64),) * 3), "layers 0 to 3 of 2 don't exist"),
        (FieldShare("kv", 0, 4, (LayerPlace(0, 0, 65),)), "leaves the 256-byte row of cache 0"),
        (FieldShare("kv", 0, 4, (LayerPlace(0, -64, 64),)), "leaves the 256-byte row of cache 0"),
        (FieldShare("kv", 0, 4, (LayerPlace(0, 0, 32),)), "two units share byte 32"),
        (FieldShare("kv", 0, 4, (LayerPlace(1, 0, 64),)), "cache 1 of 1 doesn't exist"),
        (FieldShare("kv", 0, 4, (LayerPlace(0, 0, 8, pieces=7),)), "don't divide into 7 pieces"),
        (
            FieldShare("kv", 0, 4, (LayerPlace(0, 0, 8, pieces=8, piece_stride=24),)),
            "two units share byte 24",
        ),
        (FieldShare("k", 0, 4, (LayerPlace(0, 0, 64),)), r"has the fields \['kv'\]"),
    ],
)
def test_geometry_that_does_not_fit_is_refused(share: FieldShare, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        derive_runs(make_group(units=4, unit_bytes=64, layers=2), [share], [256])


def test_two_layers_over_the_same_bytes_are_refused() -> None:
    places = (LayerPlace(0, 0, 64), LayerPlace(0, 0, 64))
    with pytest.raises(Malformed, match="two units share byte 0 of a row of cache 0"):
        derive_runs(make_group(4, 64, 2), [FieldShare("kv", 0, 4, places)], [256])


def test_tiling_names_what_is_missing_or_written_twice() -> None:
    group = make_group(units=2, unit_bytes=8, layers=2)
    ranks = [rank_runs(group, "head-major", r, 2, 2, 4, write=True) for r in range(2)]
    with pytest.raises(Malformed, match=r"byte 16 .*unit 1, layer 'l0'"):
        check_tiling(group, ranks[:1])
    with pytest.raises(Malformed, match="missing or written twice"):
        check_tiling(group, [*ranks, ranks[0]])
    with pytest.raises(Malformed, match="byte 0"):
        check_tiling(group, [])


def test_keys_and_values_kept_apart_make_cells_of_both() -> None:
    # One head of 3 tokens: keys of 2 bytes in cache 0, values of 4 in cache 1, cells of 6.
    group = make_group(units=1, unit_bytes=18, layers=1)
    k = LayerPlace(0, 0, 0, pieces=3, piece_stride=2, piece_bytes=2, piece_step=6)
    v = LayerPlace(1, 0, 0, pieces=3, piece_stride=4, at=2, piece_bytes=4, piece_step=6)
    runs = derive_runs(group, [FieldShare("kv", 0, 1, ((k, v),))], [6, 12])
    check_tiling(group, [runs])
    page = np.zeros(18, dtype=np.uint8)
    rows = [np.arange(6, dtype=np.uint8), 100 + np.arange(12, dtype=np.uint8)]
    to_page(runs, rows, page)
    assert page.tolist() == [
        0,
        1,
        100,
        101,
        102,
        103,
        2,
        3,
        104,
        105,
        106,
        107,
        4,
        5,
        *range(108, 112),
    ]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ((LayerPlace(0, 0, 0, 2, 4, piece_bytes=2, piece_step=4),), "hold 4 bytes of the 8"),
        ((LayerPlace(0, 0, 8), LayerPlace(0, 0, 8)), "hold 16 bytes of the 8.*twice"),
        (
            (LayerPlace(0, 0, 0, 2, 4, at=2, piece_bytes=4, piece_step=4),),
            "leave a unit of 8 bytes",
        ),
        ((LayerPlace(0, 0, 0, 2, 4, at=-1, piece_bytes=4, piece_step=4),), "from -1"),
    ],
)
def test_places_that_do_not_hold_a_unit_once_are_refused(
    places: tuple[LayerPlace, ...], message: str
) -> None:
    with pytest.raises(Malformed, match=message):
        derive_runs(make_group(1, 8, 1), [FieldShare("kv", 0, 1, (places,))], [16])
