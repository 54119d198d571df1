"""The canonical page, and how a rank's device pages map into it.

A page is one block of one group over all ranks. Format `page-u1` concatenates the group's
fields, each as `[units][layers][unit_bytes]`: units outermost, so the share of a rank is one
range for every tensor-parallel degree that divides the units. A chunk is `blocks_per_chunk`
pages, one after another. `docs/layout.md` has the content formats and the device forms.

    content     what the bytes of a unit mean: `AttentionContent`, `StateContent`, `OpaqueContent`
    form        how a device keeps it: `Packed`, `Split`, `TpuPacked`, `TpuLatent`, `StatePages`,
                `OpaqueHeads`, `OpaquePages`
    plan_rank   content + form + one rank's tensors -> copy runs, proved to tile the page
"""

from kvstrata.layout.attention import LAYOUTS, Packed, PhysicalLayout, Split, local_units
from kvstrata.layout.contents import (
    AttentionContent,
    Content,
    ConvOrder,
    OpaqueContent,
    Projection,
    StateContent,
    element_bytes,
)
from kvstrata.layout.opaque import OpaqueHeads, OpaquePages
from kvstrata.layout.plan import RankRuns, Ranks, plan_rank, stage_layers
from kvstrata.layout.runs import (
    CopyRun,
    FieldShare,
    LayerPlace,
    check_tiling,
    derive_runs,
    share_of,
)
from kvstrata.layout.state import StatePages
from kvstrata.layout.tensors import Cache, FieldPlaces, Pages, Tensor
from kvstrata.layout.tpu import TpuLatent, TpuPacked

__all__ = [
    "LAYOUTS",
    "AttentionContent",
    "Cache",
    "Content",
    "ConvOrder",
    "CopyRun",
    "FieldPlaces",
    "FieldShare",
    "LayerPlace",
    "OpaqueContent",
    "OpaqueHeads",
    "OpaquePages",
    "Packed",
    "Pages",
    "PhysicalLayout",
    "Projection",
    "RankRuns",
    "Ranks",
    "Split",
    "StateContent",
    "StatePages",
    "Tensor",
    "TpuLatent",
    "TpuPacked",
    "check_tiling",
    "derive_runs",
    "element_bytes",
    "local_units",
    "plan_rank",
    "share_of",
    "stage_layers",
]
