"""What a token may do, and what each operation of the API needs.

    role          may also        for
    read          -               lookups, lists, metrics
    orchestrate   read            routers and schedulers: transfers
    node          read            nodes: registration, heartbeats, reports, commands, drains
    admin         all of them     people who run it: the audit log, taking nodes out of service

An operation that this table lacks needs `admin` unless it only reads, and none is open to a token
that is limited to tenants unless the table says that it keeps tenants apart.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvstrata.keys import Namespace

__all__ = ["ANYONE", "ROOT", "Identity", "Needs", "Role", "needs_of"]


class Role(enum.StrEnum):
    READ = "read"
    ORCHESTRATE = "orchestrate"
    NODE = "node"
    ADMIN = "admin"


_ALSO = {
    Role.READ: frozenset({Role.READ}),
    Role.ORCHESTRATE: frozenset({Role.READ, Role.ORCHESTRATE}),
    Role.NODE: frozenset({Role.READ, Role.NODE}),
    Role.ADMIN: frozenset(Role),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who asks. `tenants` None: all of them; `node` None: in the name of any node."""

    name: str
    role: Role
    tenants: frozenset[str] | None = None
    node: str | None = None

    def may(self, role: Role) -> bool:
        return role in _ALSO[self.role]

    def may_see(self, namespace: Namespace | None) -> bool:
        """Whether chunks of this namespace exist for them; None: its document isn't known."""
        if self.tenants is None:
            return True
        return namespace is not None and namespace.tenant in self.tenants


ROOT = Identity("settings", Role.ADMIN)
"""Who bears the token of the settings file."""
ANYONE = Identity("anyone", Role.ADMIN)
"""Everybody, while no token exists: such a server listens on loopback only."""


@dataclass(frozen=True, slots=True)
class Needs:
    """`by_tenant`: the operation keeps tenants apart. `audited`: it is written to the audit log;
    what nodes report many times a second is not, nor are questions."""

    role: Role
    by_tenant: bool = False
    audited: bool = False


_NEEDS = {
    "register_node": Needs(Role.NODE, audited=True),
    "deregister_node": Needs(Role.NODE, audited=True),
    "put_heartbeat": Needs(Role.NODE),
    "post_report": Needs(Role.NODE),
    "poll_commands": Needs(Role.NODE),
    "post_progress": Needs(Role.NODE),
    "lookup_placements": Needs(Role.READ, by_tenant=True),
    "list_namespaces": Needs(Role.READ, by_tenant=True),
    "create_transfer": Needs(Role.ORCHESTRATE, by_tenant=True, audited=True),
    "create_prefetch": Needs(Role.ORCHESTRATE, by_tenant=True, audited=True),
    "create_lease": Needs(Role.ORCHESTRATE, by_tenant=True, audited=True),
    "get_lease": Needs(Role.READ, by_tenant=True),
    "release_lease": Needs(Role.ORCHESTRATE, by_tenant=True, audited=True),
    "create_eviction": Needs(Role.ADMIN, audited=True),
    "post_eviction_result": Needs(Role.NODE),
    "create_drain": Needs(Role.NODE, audited=True),
    "cancel_drain": Needs(Role.NODE, audited=True),
    "post_store_result": Needs(Role.NODE),
    "get_transfer": Needs(Role.READ, by_tenant=True),
    "watch_transfer": Needs(Role.READ, by_tenant=True),
    "cancel_transfer": Needs(Role.ORCHESTRATE, by_tenant=True, audited=True),
    "list_quotas": Needs(Role.READ, by_tenant=True),
    "get_quota": Needs(Role.READ, by_tenant=True),
    "put_quota": Needs(Role.ADMIN, audited=True),
    "delete_quota": Needs(Role.ADMIN, audited=True),
    "list_audit": Needs(Role.ADMIN),
    "register_instance": Needs(Role.ORCHESTRATE, audited=True),
    "unregister_instance": Needs(Role.ORCHESTRATE, audited=True),
    "query_prefix": Needs(Role.READ, by_tenant=True),
    "query_prefix_by_hash": Needs(Role.READ, by_tenant=True),
}
_QUESTION = Needs(Role.READ)
_UNKNOWN = Needs(Role.ADMIN, audited=True)


def needs_of(operation: str, method: str) -> Needs:
    """Of an operation by the name in the API's document, and its HTTP method."""
    return _NEEDS.get(operation, _QUESTION if method in ("GET", "HEAD") else _UNKNOWN)
