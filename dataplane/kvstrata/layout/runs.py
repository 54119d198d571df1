"""Copy runs: how one rank's device rows map into a page, derived and proved.

A device keeps its KV cache in *caches*: arrays of rows, one row per block. `derive_runs` turns
"which units and layers this rank has, and where they lie in a row" into `CopyRun`s, merges what
is adjacent on both sides, and refuses what does not fit exactly: a wrong stride or head count
must fail at registration, not show up as wrong text.

    head-major rows  [H][N][C]   LayerPlace(cache, 0, unit_stride=N * C)
    token-major rows [N][H][C]   LayerPlace(cache, 0, unit_stride=C, pieces=N, piece_stride=H * C)
    latent (MLA) rows [N][C]     one unit: LayerPlace(cache, 0, unit_stride=N * C)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvstrata.errors import Malformed
from kvstrata.keys import Group

__all__ = ["CopyRun", "FieldShare", "LayerPlace", "check_tiling", "derive_runs", "share_of"]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """`count` fragments of `nbytes` that a row of cache `cache` and a page have in common.

    Fragment i is at `device_offset + i * device_stride` in the row and at
    `page_offset + i * page_stride` in the page. All in bytes.
    """

    cache: int
    device_offset: int
    page_offset: int
    nbytes: int
    count: int = 1
    device_stride: int = 0
    page_stride: int = 0


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where one layer of a field, or a part of it, lies in a row of cache `cache`. All in bytes.

    The rank's first unit starts at `offset`, the next `unit_stride` further. A unit is `pieces`
    pieces, `piece_stride` apart; one piece if the device keeps a unit's bytes together.

    In the page a unit's pieces follow each other, unless the last three say otherwise: then piece
    i is the `piece_bytes` bytes at `at + i * piece_step` of the unit, and other places of the same
    layer hold the rest. Keys of K and V kept apart, with cells of `c = k + v` bytes a token, are
    `at=0, piece_bytes=k, piece_step=c`, and the values `at=k, piece_bytes=v, piece_step=c`.
    """

    cache: int
    offset: int
    unit_stride: int
    pieces: int = 1
    piece_stride: int = 0
    at: int = 0
    piece_bytes: int = 0
    piece_step: int = 0


@dataclass(frozen=True, slots=True)
class FieldShare:
    """Units `[start, start + count)` and layers `[first_layer, first_layer + len(layers))`.

    A layer is one place, or several that together hold each byte of its units once.
    """

    field: str
    start: int
    count: int
    layers: tuple[LayerPlace | tuple[LayerPlace, ...], ...]
    first_layer: int = 0


def share_of(units: int, layers: int, rank: int, ranks: int) -> tuple[range, range]:
    """Which (units, layers) of a field rank `rank` of `ranks` writes.

    Units are split evenly. Where there are more ranks than units, the ranks that hold the same
    units split their layers between them, so that each byte has one writer and one page uses all
    links. Raises `Malformed` if neither number divides the other.
    """
    if not 0 <= rank < ranks:
        raise Malformed(f"rank {rank} is not one of {ranks}")
    if units % ranks == 0:
        count = units // ranks
        return range(rank * count, (rank + 1) * count), range(layers)
    if ranks % units == 0:
        replicas = ranks // units
        unit, replica = divmod(rank, replicas)
        first = layers * replica // replicas
        return range(unit, unit + 1), range(first, layers * (replica + 1) // replicas)
    raise Malformed(
        f"{units} units can't be shared evenly by {ranks} ranks: "
        "use a tensor-parallel size that divides the KV heads, or is a multiple of them"
    )


def derive_runs(
    group: Group, shares: Sequence[FieldShare], row_bytes: Sequence[int]
) -> tuple[CopyRun, ...]:
    """The runs of one rank, in page order. `row_bytes[i]` is the usable size of a row of cache i.

    Every field of the group must be shared exactly once (with no layers, if this rank has none).
    Raises `Malformed`, naming the field, if the shares leave the page or the rows, or if two
    units would share bytes of a row.
    """
    names = [f.name for f in group.fields]
    if sorted(s.field for s in shares) != sorted(names):
        raise Malformed(
            f"group {group.id} has the fields {names}, the shares are of "
            f"{[s.field for s in shares]}"
        )
    by_name = {s.field: s for s in shares}
    runs: list[CopyRun] = []
    base = 0
    for field in group.fields:
        share = by_name[field.name]
        mine = _field_runs(group, share, base, field.units, field.unit_bytes)
        _check_share(group, share, mine, field.unit_bytes)
        runs += mine
        base += field.units * len(group.layers) * field.unit_bytes
    merged = _merge(runs)
    _check_rows(group, merged, row_bytes)
    return tuple(merged)


def check_tiling(group: Group, per_rank: Iterable[Sequence[CopyRun]]) -> None:
    """Raises `Malformed` unless the ranks' runs together write each byte of the page once."""
    starts, ends = _intervals([r for runs in per_rank for r in runs], page=True)
    edges = np.concatenate(([0], ends))
    wrong = np.flatnonzero(np.concatenate((starts, [group.page_bytes])) != edges)
    if wrong.size:
        at = int(edges[wrong[0]])
        raise Malformed(
            f"group {group.id}: the ranks do not write each byte of a page once: "
            f"byte {at} ({_where(group, at)}) is missing or written twice"
        )


def _field_runs(
    group: Group, share: FieldShare, base: int, units: int, unit_bytes: int
) -> list[CopyRun]:
    name, layers = f"group {group.id}, field {share.field!r}", len(group.layers)
    if not (share.start >= 0 and share.count >= 1 and share.start + share.count <= units):
        raise Malformed(
            f"{name}: units {share.start} to {share.start + share.count} of {units} don't exist"
        )
    if not (share.first_layer >= 0 and share.first_layer + len(share.layers) <= layers):
        raise Malformed(
            f"{name}: layers {share.first_layer} to {share.first_layer + len(share.layers)} "
            f"of {layers} don't exist"
        )
    runs: list[CopyRun] = []
    for layer, places in enumerate(share.layers, share.first_layer):
        page = base + (share.start * layers + layer) * unit_bytes
        for place in (places,) if isinstance(places, LayerPlace) else places:
            runs += _place_runs(name, place, page, share.count, unit_bytes, layers * unit_bytes)
    return runs


def _place_runs(
    name: str, place: LayerPlace, page: int, units: int, unit_bytes: int, page_stride: int
) -> list[CopyRun]:
    """`page` is where the first unit of this layer begins, `page_stride` leads to the next."""
    if place.pieces < 1 or (not place.piece_bytes and unit_bytes % place.pieces):
        raise Malformed(f"{name}: {unit_bytes} bytes don't divide into {place.pieces} pieces")
    piece = place.piece_bytes or unit_bytes // place.pieces
    step = place.piece_step or piece
    if min(piece, step) < 1 or place.at < 0:
        raise Malformed(f"{name}: a piece has {piece} bytes, {step} apart, from {place.at}")
    if place.at + (place.pieces - 1) * step + piece > unit_bytes:
        raise Malformed(
            f"{name}: {place.pieces} pieces of {piece} bytes, {step} apart, leave a unit of "
            f"{unit_bytes} bytes"
        )

    def run(unit: int, part: int, nbytes: int, count: int, device: int, in_page: int) -> CopyRun:
        return CopyRun(
            cache=place.cache,
            device_offset=place.offset + unit * place.unit_stride + part * place.piece_stride,
            page_offset=page + unit * page_stride + place.at + part * step,
            nbytes=nbytes,
            count=count,
            device_stride=device,
            page_stride=in_page,
        )

    if place.pieces == 1 or place.piece_stride == piece == step:
        return [run(0, 0, piece * place.pieces, units, place.unit_stride, page_stride)]
    if place.pieces < units:
        return [
            run(0, part, piece, units, place.unit_stride, page_stride)
            for part in range(place.pieces)
        ]
    return [run(u, 0, piece, place.pieces, place.piece_stride, step) for u in range(units)]


def _check_share(group: Group, share: FieldShare, runs: Sequence[CopyRun], unit_bytes: int) -> None:
    """A rank must hold each byte of its units once: not a key without its value."""
    starts, ends = _intervals(runs, page=True)
    covered = int((ends - starts).sum())
    expected = share.count * len(share.layers) * unit_bytes
    twice = (starts[1:] < ends[:-1]).any()
    if covered != expected or twice:
        raise Malformed(
            f"group {group.id}, field {share.field!r}: the places of a layer hold {covered} bytes "
            f"of the {expected} of this rank's units" + (", some of them twice" if twice else "")
        )


def _merge(runs: Iterable[CopyRun]) -> list[CopyRun]:
    """Fewer, longer runs that copy the same bytes."""
    out: list[CopyRun] = []
    for run in sorted(map(_flat, runs), key=lambda r: (r.page_offset, r.cache)):
        if out and (joined := _joined(out[-1], run)):
            out[-1] = joined
        else:
            out.append(run)
    return out


def _joined(a: CopyRun, b: CopyRun) -> CopyRun | None:
    """One run for both, if b's fragments follow a's on both sides."""
    same = (a.cache, a.count, a.device_stride, a.page_stride) == (
        b.cache,
        b.count,
        b.device_stride,
        b.page_stride,
    )
    follows = (
        a.device_offset + a.nbytes == b.device_offset and a.page_offset + a.nbytes == b.page_offset
    )
    return _flat(replace(a, nbytes=a.nbytes + b.nbytes)) if same and follows else None


def _flat(run: CopyRun) -> CopyRun:
    """One fragment where the fragments touch on both sides."""
    if run.count > 1 and run.nbytes == run.device_stride == run.page_stride:
        run = replace(run, nbytes=run.nbytes * run.count, count=1)
    if run.count == 1 and (run.device_stride or run.page_stride):
        run = replace(run, device_stride=0, page_stride=0)
    return run


def _check_rows(group: Group, runs: Sequence[CopyRun], row_bytes: Sequence[int]) -> None:
    for cache in {r.cache for r in runs}:
        if not 0 <= cache < len(row_bytes):
            raise Malformed(f"group {group.id}: cache {cache} of {len(row_bytes)} doesn't exist")
        mine = [r for r in runs if r.cache == cache]
        starts, ends = _intervals(mine, page=False)
        if starts[0] < 0 or ends.max() > row_bytes[cache]:
            culprit = next(
                r
                for r in mine
                if min(r.device_offset, r.device_offset + (r.count - 1) * r.device_stride) < 0
                or r.device_offset + (r.count - 1) * r.device_stride + r.nbytes > row_bytes[cache]
            )
            raise Malformed(
                f"group {group.id}: {_where(group, culprit.page_offset)} leaves the "
                f"{row_bytes[cache]}-byte row of cache {cache}"
            )
        if (starts[1:] < ends[:-1]).any():
            at = int(starts[1:][starts[1:] < ends[:-1]][0])
            raise Malformed(
                f"group {group.id}: two units share byte {at} of a row of cache {cache}; "
                f"check the strides of {[f.name for f in group.fields]}"
            )


def _intervals(runs: Sequence[CopyRun], page: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sorted starts and ends of all fragments, in the page or in the row."""
    if not runs:
        empty = np.empty(0, dtype=np.int64)
        return empty, empty
    parts = [
        (r.page_offset if page else r.device_offset)
        + (r.page_stride if page else r.device_stride) * np.arange(r.count, dtype=np.int64)
        for r in runs
    ]
    starts = np.concatenate(parts)
    ends = starts + np.repeat([r.nbytes for r in runs], [r.count for r in runs])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def _where(group: Group, page_offset: int) -> str:
    """The field, unit and layer of one byte of a page, in words."""
    base = 0
    for field in group.fields:
        size = field.units * len(group.layers) * field.unit_bytes
        if page_offset < base + size:
            unit, layer = divmod((page_offset - base) // field.unit_bytes, len(group.layers))
            return f"field {field.name!r}, unit {unit}, layer {group.layers[layer]!r}"
        base += size
    return "past the end of the page"
