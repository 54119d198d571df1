"""Attention in every form: what is stored by some ranks in one, others load in another.

The page of the content is defined by numpy (`page_of`). A form is right if its writers make
exactly that page, and its readers make exactly the device that holds what the page was made of.
So if two forms pass, each reads what the other wrote.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstrata.errors import Malformed
from kvstrata.layout import (
    AttentionContent,
    OpaqueContent,
    OpaqueHeads,
    OpaquePages,
    Packed,
    Ranks,
    Split,
    Tensor,
    TpuLatent,
    TpuPacked,
    element_bytes,
    plan_rank,
    share_of,
    stage_layers,
)
from kvstrata_adapters.devices.base import Copy
from kvstrata_adapters.devices.cpu import CpuDevice
from layout_attention_kit import local_of, makers, opaque_heads, packed, page_of, truth_of
from layout_kit import BLOCKS, check_load, store

SLOW = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


def parallel(heads: int) -> list[int]:
    """Degrees that share heads evenly, or hold copies of them."""
    return [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]


@st.composite
def ranks_of(draw: st.DrawFn, heads: int, layers: int) -> Ranks:
    tp = draw(st.sampled_from(parallel(heads)))
    return Ranks(tp, stage_layers(layers, draw(st.integers(1, 3))))


contents = st.one_of(
    st.builds(
        AttentionContent,
        heads=st.sampled_from([1, 2, 3, 4, 6, 8]),
        tokens=st.integers(1, 5),
        key=st.integers(1, 5),
        value=st.integers(1, 5),
        dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
    ),
    # Those that a TPU keeps too: keys and values of one size, with and without padded lanes.
    st.builds(
        lambda heads, tokens, size, dtype: AttentionContent(heads, tokens, size, size, dtype),
        st.sampled_from([1, 2, 4]),
        st.integers(1, 3),
        st.sampled_from([5, 64, 96, 128, 130]),
        st.sampled_from(["bfloat16", "float32", "float8_e5m2"]),
    ),
    st.builds(
        AttentionContent,
        heads=st.just(1),
        tokens=st.integers(1, 5),
        key=st.sampled_from([3, 128, 132]),
        value=st.just(0),
        dtype=st.sampled_from(["bfloat16", "float8_e4m3fn"]),
    ),
)


@SLOW
@given(contents, st.integers(1, 4), st.data())
def test_any_form_and_any_ranks_read_what_any_others_wrote(
    content: AttentionContent, layers: int, data: st.DataObject
) -> None:
    group = content.group(0, "full", [f"l{i}" for i in range(layers)])
    forms = makers(content)
    wrote, read = (data.draw(st.sampled_from(sorted(forms))) for _ in range(2))
    writers, readers = (data.draw(ranks_of(content.heads, layers)) for _ in range(2))
    there, here = (data.draw(st.integers(0, BLOCKS - 1)) for _ in range(2))
    truth = truth_of(content, layers)
    page = store(group, forms[wrote], writers, local_of(truth), there)
    np.testing.assert_array_equal(page, page_of(truth))
    check_load(group, forms[read], readers, local_of(truth), here, page)


@pytest.mark.parametrize(
    "content",
    [
        AttentionContent(4, 3, 5, 5, "bfloat16"),
        AttentionContent(2, 2, 64, 64, "bfloat16"),
        AttentionContent(2, 2, 3, 2, "float32"),
        AttentionContent(1, 4, 132, 0, "bfloat16"),
    ],
    ids=str,
)
def test_all_forms_at_all_degrees_make_one_page(content: AttentionContent) -> None:
    """Every pair of forms, and every pair of degrees, through the one page they share."""
    group = content.group(0, "full", ["a", "b", "c"])
    truth = truth_of(content, 3)
    for make in makers(content).values():
        for tp in parallel(content.heads):
            for stages in (1, 2):
                ranks = Ranks(tp, stage_layers(3, stages))
                page = store(group, make, ranks, local_of(truth), 1)
                np.testing.assert_array_equal(page, page_of(truth))
                check_load(group, make, ranks, local_of(truth), 2, page)


def test_ranks_beyond_the_heads_share_the_writing_and_all_read() -> None:
    content = AttentionContent(2, 4, 2, 2, "bfloat16")
    group = content.group(0, "sliding_window", [f"l{i}" for i in range(4)], window=8)
    ranks = Ranks(8, (range(4),))
    maker = makers(content)["LBHNC"]
    sizes = []
    for r in range(8):
        runs = plan_rank(group, ranks, 0, r, maker(8, r, range(4)).pages(8))
        sizes.append(sum(x.nbytes * x.count for x in runs.store))
        assert sum(x.nbytes * x.count for x in runs.load) == group.page_bytes // 2
    assert sizes == [group.page_bytes // 8] * 8  # four ranks hold a head, each writes one layer


def test_the_proof_does_not_believe_the_election(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks that hold the same bytes all thought that they write them, plan_rank must see it."""
    group = AttentionContent(2, 4, 2, 2, "bfloat16").group(0, "full", ["a", "b"])
    pages = makers(AttentionContent(2, 4, 2, 2, "bfloat16"))["LBHNC"](4, 0, range(2)).pages(4)
    plan_rank(group, Ranks(4, (range(2),)), 0, 0, pages)

    def all_write(units: int, layers: int, rank: int, ranks: int) -> tuple[range, range]:
        return share_of(units, layers, rank, ranks)[0], range(layers)

    monkeypatch.setattr("kvstrata.layout.plan.share_of", all_write)
    with pytest.raises(Malformed, match="missing or written twice"):
        plan_rank(group, Ranks(4, (range(2),)), 0, 0, pages)


@pytest.mark.parametrize(
    ("layout", "count", "nbytes"),
    [
        ("BHLNC", 1, 2 * 32 * 16 * 512),  # the rank's share of the page is one run
        ("LBHNC", 64, 16 * 512),
        ("BLHNC", 64, 16 * 512),
        ("LHBNC", 64, 16 * 512),
        ("LBNHC", 1024, 512),
        ("BLNHC", 1024, 512),
    ],
)
def test_fragments_are_as_few_as_the_layout_allows(layout: str, count: int, nbytes: int) -> None:
    """L=32, 8 heads over 4 ranks, 16 tokens of 128+128 bf16: the counts of the design's table."""
    content = AttentionContent(8, 16, 128, 128, "bfloat16")
    group = content.group(0, "full", [f"l{i}" for i in range(32)])
    device = packed(content, layout, 0, False, 4, 1, range(32))
    runs = plan_rank(group, Ranks(4, (range(32),)), 0, 1, device.pages(4)).load
    assert sum(r.count for r in runs) == count
    assert {r.nbytes for r in runs} == {nbytes}


def test_unpadded_tpu_rows_are_copied_as_whole_cells() -> None:
    content = AttentionContent(2, 3, 128, 128, "bfloat16")
    group = content.group(0, "full", ["l"])
    pages = makers(content)["tpu"](1, 0, range(1)).pages(1)
    runs = plan_rank(group, Ranks(1, (range(1),)), 0, 0, pages).load
    assert [r.nbytes for r in runs] == [512, 512]


# ---------------------------------------------------------------- opaque


@SLOW
@given(
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 9),
    st.integers(1, 3),
    st.integers(0, 2),
    st.data(),
)
def test_opaque_heads_are_portable_over_ranks(
    heads: int, size: int, layers: int, pad: int, data: st.DataObject
) -> None:
    content = OpaqueContent("cpu-attn/amx", heads, size, tokens=4)
    group = content.group(0, "full", [f"l{i}" for i in range(layers)])
    make = partial(opaque_heads, content, pad)
    truth = np.random.default_rng(0).integers(0, 256, (layers, heads, 1, size), dtype=np.uint8)
    writers, readers = (data.draw(ranks_of(heads, layers)) for _ in range(2))
    page = store(group, make, writers, local_of(truth), 0)
    np.testing.assert_array_equal(page, page_of(truth))
    check_load(group, make, readers, local_of(truth), 1, page)


def test_wholly_opaque_pages_are_of_one_tp() -> None:
    content = OpaqueContent("unknown-kernel", 2, 6, tokens=4, ranks=2)
    assert content.tag == "opaque/unknown-kernel/tp=2"
    group = content.group(0, "opaque", ["a", "b"])
    tensors = [Tensor((3, 1, 6), (8, 6, 1), 1, 24, buffer=i) for i in range(2)]
    pages = OpaquePages(8).pages(content, tensors, 2)
    runs = plan_rank(group, Ranks(2, (range(2),)), 0, 1, pages)
    assert [(r.cache, r.page_offset, r.nbytes) for r in runs.store] == [(0, 12, 6), (1, 18, 6)]
    with pytest.raises(Malformed, match=r"opaque/unknown-kernel/tp=2 can't be .* with tp 1"):
        OpaquePages(8).pages(content, tensors, 1)
    with pytest.raises(Malformed, match="the pages have 1 units, 2 over 1 ranks are 2"):
        plan_rank(group, Ranks(1, (range(2),)), 0, 0, pages)
    with pytest.raises(Malformed, match="opaque per rank"):
        OpaqueHeads().pages(content, tensors, 2)
    with pytest.raises(Malformed, match="units is 4"):
        OpaqueContent("x", 4, 6, 4, ranks=2).fields()


# ---------------------------------------------------------------- refusals

KV = AttentionContent(4, 3, 4, 4, "bfloat16")
GOOD = Tensor((5, 2, 3, 8), (96, 48, 16, 2), 2, 480)  # LBHNC, 2 of 4 heads


def changed(**fields: object) -> Tensor:
    values = {name: getattr(GOOD, name) for name in GOOD.__slots__}
    return Tensor(**(values | fields))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (changed(shape=(5, 4, 3, 8)), r"layer 0: shape\[heads\] is 4, it must be 2"),
        (changed(shape=(5, 2, 4, 8)), r"shape\[tokens\] is 4, it must be 3"),
        (changed(shape=(5, 2, 3, 4)), r"shape\[content\] is 4, it must be 8"),
        (changed(shape=(0, 2, 3, 8)), r"shape\[blocks\] is 0"),
        (
            changed(shape=(5, 6, 8), strides=(96, 16, 2)),
            r"it must have the axes \['blocks', 'heads'",
        ),
        (changed(strides=(96, 16, 48, 2)), r"stride\[heads\] is 16 bytes, it must be 48"),
        (changed(strides=(96, 48, 32, 2)), r"stride\[tokens\] is 32 bytes, it must be 16"),
        (changed(strides=(192, 48, 16, 2)), r"stride\[blocks\] is 192 bytes, it must be 96"),
        (changed(strides=(96, 48, 16, 4)), r"stride\[content\] is 4 bytes, it must be 2"),
        (changed(element_bytes=4), "element_bytes is 4, the content's dtype has 2"),
        (changed(buffer_bytes=478), "it needs 480 bytes, buffer_bytes is 478"),
        (changed(offset=2), "from offset 2 it needs 480 bytes, buffer_bytes is 480"),
        (changed(offset=-2), "from offset -2"),
    ],
)
def test_a_tensor_that_is_not_what_the_geometry_says_is_refused(
    tensor: Tensor, message: str
) -> None:
    Packed("LBHNC").pages(KV, [GOOD], 2)
    with pytest.raises(Malformed, match=message):
        Packed("LBHNC").pages(KV, [tensor], 2)


@settings(max_examples=100, deadline=None)
@given(contents, st.integers(1, 3), st.data())
def test_a_wrong_stride_or_size_on_any_axis_of_any_packed_layout_is_refused(
    content: AttentionContent, layers: int, data: st.DataObject
) -> None:
    forms = {n: m for n, m in makers(content).items() if n[:5] in ("LBHNC", "LBNHC", "BHLNC")}
    make = forms[data.draw(st.sampled_from(sorted(forms)))]
    tp = data.draw(st.sampled_from(parallel(content.heads)))
    device = make(tp, 0, range(layers))
    tensors, form = device.tensors, device.form
    victim = data.draw(st.integers(0, layers - 1))
    good = tensors[victim]
    axis = data.draw(st.integers(0, 3))
    what = data.draw(st.sampled_from(["shape", "strides"]))
    if what == "strides" and good.shape[axis] == 1:
        return  # such a stride means nothing
    values = list(getattr(good, what))
    values[axis] = data.draw(st.integers(1, 2 * values[axis]).filter(lambda n: n != values[axis]))
    fields = {name: getattr(good, name) for name in good.__slots__} | {what: tuple(values)}
    if what == "shape" and axis == 0:
        fields["buffer_bytes"] = good.offset + 1  # fewer blocks are no error, missing memory is
    tensors[victim] = Tensor(**fields)
    with pytest.raises(Malformed, match=r"shape\[|stride\[|buffer_bytes|blocks are"):
        form.pages(content, tensors, tp)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Packed("LBHNC", page_bytes=95).pages(KV, [GOOD], 2),
            "page_bytes is 95, .* 96 bytes",
        ),
        (lambda: Packed("LBHNC", page_bytes=128).pages(KV, [GOOD], 2), r"stride\[blocks\] is 96"),
        (lambda: Packed("LHBNC", page_bytes=96).pages(KV, [GOOD], 2), "LHBNC has no pages to pad"),
        (lambda: Packed("LBHNC", block_bytes=96).pages(KV, [GOOD], 2), "not outermost in LBHNC"),
        (lambda: Packed("BLHNC", block_bytes=95).pages(KV, [GOOD], 2), "block_bytes is 95"),
        (lambda: Packed("HBLNC").pages(KV, [GOOD], 2), "layout is 'HBLNC'"),
        (lambda: Packed("LBHNC").pages(KV, [GOOD, GOOD], 2), "two tensors share bytes"),
        (lambda: Packed("LBHNC").pages(KV, [GOOD], 3), "4 units can't be shared evenly by 3 ranks"),
        (lambda: Split("DHN").pages(KV, [], 2), "order is 'DHN'"),
        (lambda: TpuPacked().pages(AttentionContent(1, 1, 3, 2, "uint8"), [], 1), "value is 2"),
        (lambda: TpuLatent().pages(KV, [], 1), "not a latent"),
        (lambda: Split("NHD").pages(AttentionContent(1, 1, 3, 0, "uint8"), [], 1), "value is 0"),
        (lambda: AttentionContent(1, 1, 9, 0, "uint8").fields(), "dtype is uint8: name the scheme"),
        (lambda: element_bytes("fp8"), "dtype is 'fp8'"),
        (lambda: AttentionContent(0, 1, 1, 1, "bfloat16").fields(), "heads, tokens and key"),
        (lambda: stage_layers(4, 0), "stages is 0"),
        (lambda: GOOD.at(1, 2), "no index 2 on axis 1"),
    ],
)
def test_geometry_that_makes_no_sense_is_refused(call: object, message: str) -> None:
    with pytest.raises(Malformed, match=message):
        call()  # type: ignore[operator]


def test_layers_of_blocks_outermost_must_lie_as_the_layout_says() -> None:
    tensors = [Tensor((5, 2, 3, 8), (192, 48, 16, 2), 2, 960, offset=i) for i in (0, 95)]
    with pytest.raises(Malformed, match=r"layer 1: .*\(0, 95, 5\), in BLHNC they are \(0, 96, 5\)"):
        Packed("BLHNC").pages(KV, tensors, 2)


def test_halves_of_a_block_must_touch() -> None:
    k = Tensor((5, 3, 2, 4), (96, 16, 8, 2), 2, 480)
    v = Tensor((5, 3, 2, 4), (96, 16, 8, 2), 2, 480, offset=46)
    with pytest.raises(Malformed, match="offset of V is 46, it must be 48"):
        Split("NHD", "in_block").pages(KV, [(k, v)], 2)


def test_ranks_that_do_not_fit_the_group_are_refused() -> None:
    group = KV.group(0, "full", ["a"])
    pages = Packed("LBHNC").pages(KV, [GOOD], 2)
    with pytest.raises(Malformed, match=r"stages are the layers \[0, 1\]"):
        plan_rank(group, Ranks(2, (range(2),)), 0, 0, pages)
    with pytest.raises(Malformed, match="stage 1, tp_rank 0 is not one of"):
        plan_rank(group, Ranks(2, (range(1),)), 1, 0, pages)
    with pytest.raises(Malformed, match="field 'kv': the pages have 1 layers, the stage has 2"):
        plan_rank(KV.group(0, "full", ["a", "b"]), Ranks(2, (range(2),)), 0, 0, pages)
    with pytest.raises(Malformed, match="the pages have 2 units, 4 over 4 ranks are 1"):
        plan_rank(group, Ranks(4, (range(1),)), 0, 0, pages)
    other = OpaqueContent("x", 2, 8, 3, ranks=2).group(0, "opaque", ["a"])
    with pytest.raises(Malformed, match=r"has the fields \['page'\], the pages have \['kv'\]"):
        plan_rank(other, Ranks(2, (range(1),)), 0, 0, pages)


def test_a_cache_is_seen_by_a_cpu_device_as_rows() -> None:
    content = AttentionContent(2, 2, 1, 1, "float8_e4m3fn")
    device = packed(content, "LHBNC", 0, False, 1, 0, range(1))
    truth = truth_of(content, 1)
    device.put(1, truth)
    cache = device.pages(1).caches[0]
    rows = cache.view(device.bytes()[0])
    assert rows.shape == (BLOCKS, cache.row_bytes)
    assert rows[1, :4].tobytes() == truth[0, 0].tobytes()
    with pytest.raises(Malformed, match="leaves an allocation"):
        cache.view(device.bytes()[0][:-1])


def test_tags_say_what_the_bytes_mean() -> None:
    assert AttentionContent(8, 16, 128, 64, "bfloat16").tag == "kv-packed/bfloat16/128+64"
    assert AttentionContent(1, 64, 576, 0, "bfloat16").tag == "latent/bfloat16/576"
    assert (
        AttentionContent(1, 64, 656, 0, "uint8", "fp8_ds_mla").tag == "latent/uint8/656/fp8_ds_mla"
    )
    assert OpaqueContent("cpu-attn/amx", 8, 4096, 16).tag == "opaque/cpu-attn/amx/4096"


@pytest.mark.parametrize(
    "wrote", ["LHBNC", "BLNHC, padded", "BHLNC", "split HND all layers", "tpu"]
)
def test_a_cpu_device_copies_what_the_oracle_says(wrote: str) -> None:
    """TP 2 stores in some form, TP 1 loads head-major rows, both through a real device."""
    content = AttentionContent(4, 3, 5, 5, "bfloat16")
    group = content.group(7, "full", ["a", "b"])
    truth = truth_of(content, 2)
    region = np.zeros(group.page_bytes + 11, dtype=np.uint8)
    copies = [Copy(7, np.array([1]), np.array([11]))]

    def transfer(form: str, ranks: Ranks, load: bool) -> None:
        for rank in range(ranks.tp):
            device = makers(content)[form](ranks.tp, rank, range(2))
            want = makers(content)[form](ranks.tp, rank, range(2))
            want.put(1, local_of(truth)(ranks.tp, rank, range(2)))
            if not load:
                device.put(1, local_of(truth)(ranks.tp, rank, range(2)))
            pages = device.pages(ranks.tp)
            runs = plan_rank(group, ranks, 0, rank, pages)
            caches = [c.view(device.bytes()[c.buffer]) for c in pages.caches]
            with closing(CpuDevice()) as cpu:
                cpu.register_caches(caches, {7: runs.load}, {7: group.page_bytes}, {7: runs.store})
                cpu.attach(memoryview(region))
                (cpu.load if load else cpu.store)(1, copies)
                cpu.wait([1], 10)
                [result] = cpu.finished()
            assert result.error is None
            for got, expected in zip(device.bytes(), want.bytes(), strict=True):
                np.testing.assert_array_equal(got, expected)

    transfer(wrote, Ranks(2, (range(2),)), load=False)
    np.testing.assert_array_equal(region[11:], page_of(truth))
    transfer("LBHNC", Ranks(1, (range(2),)), load=True)
