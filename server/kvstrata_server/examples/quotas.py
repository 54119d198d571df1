"""Of what is asked about tenants."""

from __future__ import annotations

from kvstrata import api
from kvstrata_server.examples.world import CREATED

__all__ = ["EXAMPLES"]

_GIB = 1 << 30
_USE = api.TenantUse(
    bytes=410 * _GIB,
    chunks=839_680,
    tiers={"host": 96 * _GIB, "fs": 314 * _GIB},
    age=1.2,
    transfers=3,
    transfer_bytes=6 * _GIB,
)
_SET = api.QuotaInfo(
    tenant="acme",
    max_bytes=512 * _GIB,
    max_transfers=8,
    changed=CREATED,
    use=_USE,
)

EXAMPLES = {
    "put_quota": (api.QuotaRequest(max_bytes=512 * _GIB, max_transfers=8), _SET),
    "list_quotas": (None, api.QuotaList(quotas=[_SET])),
    "get_quota": (None, _SET),
    "delete_quota": (None, api.QuotaInfo(tenant="acme", use=_USE)),
}
