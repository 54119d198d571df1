"""From a rank's device pages to its copy runs, proved against all the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvstrata.errors import Malformed
from kvstrata.keys import Group
from kvstrata.layout.runs import (
    CopyRun,
    FieldShare,
    LayerPlace,
    check_tiling,
    derive_runs,
    share_of,
)
from kvstrata.layout.tensors import Cache, FieldPlaces, Pages

__all__ = ["RankRuns", "Ranks", "plan_rank", "stage_layers"]


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks of an engine: `tp` in each pipeline stage.

    Stage i has the group's layers `stages[i]`; an empty range if it has none of them.
    """

    tp: int
    stages: tuple[range, ...]

    def checked(self, group: Group) -> Ranks:
        """Itself, if the stages are the group's layers in order. Raises `Malformed`."""
        layers = [layer for stage in self.stages for layer in stage]
        if self.tp < 1 or layers != list(range(len(group.layers))):
            raise Malformed(
                f"group {group.id}: stages are the layers {layers} with tp {self.tp}, they must be "
                f"0 to {len(group.layers) - 1}, each once and in order"
            )
        return self


@dataclass(frozen=True, slots=True)
class RankRuns:
    """`load` is all that a rank keeps of a page, `store` what of it this rank writes."""

    load: tuple[CopyRun, ...]
    store: tuple[CopyRun, ...]


def stage_layers(layers: int, stages: int) -> tuple[range, ...]:
    """A group's layers split over pipeline stages as evenly as can be."""
    if stages < 1:
        raise Malformed(f"stages is {stages}, it must be at least 1")
    ends = [layers * i // stages for i in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


def plan_rank(group: Group, ranks: Ranks, stage: int, tp_rank: int, pages: Pages) -> RankRuns:
    """The runs of one rank, with proof that all ranks together write each byte of a page once.

    The other ranks' pages are not known here. Which bytes they write follows from the geometry
    alone, so each stands in the proof with a dense page. Bytes that several ranks hold are written
    by one of them (they share the layers), and loaded by all. Raises `Malformed` naming the field.
    """
    ranks.checked(group)
    if not (0 <= stage < len(ranks.stages) and 0 <= tp_rank < ranks.tp):
        raise Malformed(f"stage {stage}, tp_rank {tp_rank} is not one of {ranks}")
    mine = ranks.stages[stage]
    load = _runs(group, ranks.tp, tp_rank, mine, pages, write=False)
    store = _runs(group, ranks.tp, tp_rank, mine, pages, write=True)
    others = [
        _runs(group, ranks.tp, r, layers, _dense_pages(group, ranks.tp, layers), write=True)
        for s, layers in enumerate(ranks.stages)
        for r in range(ranks.tp)
        if (s, r) != (stage, tp_rank)
    ]
    check_tiling(group, [store, *others])
    return RankRuns(load, store)


def _runs(
    group: Group, tp: int, tp_rank: int, stage: range, pages: Pages, write: bool
) -> tuple[CopyRun, ...]:
    shares = []
    by_name = {f.field: f for f in pages.fields}
    if sorted(by_name) != sorted(f.name for f in group.fields):
        raise Malformed(
            f"group {group.id} has the fields {[f.name for f in group.fields]}, the pages have "
            f"{[f.field for f in pages.fields]}"
        )
    for field in group.fields:
        places = by_name[field.name]
        units, part = share_of(field.units, len(stage), tp_rank, tp)
        what = f"group {group.id}, field {field.name!r}"
        if places.units != len(units):
            raise Malformed(
                f"{what}: the pages have {places.units} units, {field.units} over {tp} ranks "
                f"are {len(units)}"
            )
        if len(places.layers) != len(stage):
            raise Malformed(
                f"{what}: the pages have {len(places.layers)} layers, the stage has {len(stage)}"
            )
        layers = part if write else range(len(stage))
        shares.append(
            FieldShare(
                field.name,
                units.start,
                len(units),
                places.layers[layers.start : layers.stop],
                stage.start + layers.start,
            )
        )
    return derive_runs(group, shares, [c.row_bytes for c in pages.caches])


def _dense_pages(group: Group, tp: int, stage: range) -> Pages:
    """Pages of a rank that keeps its share as the canonical page does."""
    fields, at = [], 0
    for field in group.fields:
        units = len(share_of(field.units, 1, 0, tp)[0])
        size = field.unit_bytes
        layers = tuple(
            (LayerPlace(0, at + i * size, len(stage) * size),) for i in range(len(stage))
        )
        fields.append(FieldPlaces(field.name, units, layers))
        at += units * len(stage) * size
    return Pages((Cache(0, 0, at, 1, at),), tuple(fields))
