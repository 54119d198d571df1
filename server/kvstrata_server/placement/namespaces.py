"""The namespaces that nodes reported chunks of."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from kvstrata import api
from kvstrata.errors import Malformed
from kvstrata.keys import DIGEST_BYTES, Key, Namespace, split_key
from kvstrata_server.access.roles import Identity
from kvstrata_server.lookups.reuse import Rule, rule_of
from kvstrata_server.problems import Forbidden
from kvstrata_server.sql.writes import PutNamespace, Write

__all__ = ["Namespaces"]

log = logging.getLogger(__name__)


class Namespaces:
    """Digest -> document; None where chunks were reported before the document."""

    def __init__(self) -> None:
        self._known: dict[bytes, Namespace | None] = {}
        self._rules: dict[bytes, Rule] = {}

    def load(self, digest: bytes, document: bytes | None) -> None:
        try:
            self._known[digest] = None if document is None else Namespace.parse(document)
        except Malformed as e:  # a version before this one took it
            log.warning("the document of namespace %s counts as unknown: %s", digest.hex(), e)
            self._known[digest] = None

    def learn(self, documents: Iterable[Namespace]) -> list[Write]:
        """Returns what is new."""
        new: list[Write] = []
        for namespace in documents:
            if self._known.get(namespace.digest) is None:
                self._known[namespace.digest] = namespace
                new.append(PutNamespace(namespace.digest, namespace.document))
        return new

    def mention(self, digests: Iterable[bytes]) -> list[Write]:
        """The rows that chunks of these namespaces refer to, where they are not there yet."""
        new: list[Write] = []
        for digest in digests:
            if digest not in self._known:
                self._known[digest] = None
                new.append(PutNamespace(digest, None))
        return new

    def documents(self, keys: Iterable[Key]) -> list[str]:
        """Documents behind these keys, as far as they are known."""
        found = (self._known.get(digest) for digest in {key[:DIGEST_BYTES] for key in keys})
        return [namespace.document.decode() for namespace in found if namespace is not None]

    def of_model(self, model: str, revision: str | None) -> list[str]:
        """Digests of the namespaces of a model, or of one revision of it."""
        return [
            digest.hex()
            for digest, namespace in self._known.items()
            if namespace is not None
            and namespace.model == model
            and revision in (None, namespace.revision)
        ]

    def get(self, digest: bytes) -> Namespace | None:
        """None: not reported, or its document wasn't."""
        return self._known.get(digest)

    def rule(self, digest: bytes) -> Rule | None:
        """What prefixes of this namespace need to be of use; None: its document isn't known."""
        rule = self._rules.get(digest)
        if rule is None:
            namespace = self._known.get(digest)
            if namespace is not None:
                rule = self._rules[digest] = rule_of(namespace)
        return rule

    def visible(self, who: Identity) -> list[Namespace]:
        """Those whose documents are known, and that `who` may know of."""
        known = (namespace for namespace in self._known.values() if namespace is not None)
        return [namespace for namespace in known if who.may_see(namespace)]

    def tenant(self, key: Key) -> str:
        """Of this chunk; empty where its namespace has none, or isn't known."""
        namespace = self._known.get(key[:DIGEST_BYTES])
        return "" if namespace is None else namespace.tenant

    def chunk_bytes(self, key: Key) -> int:
        """Bytes of this chunk; 0 if its namespace or group isn't known."""
        digest, group, _ = split_key(key)
        namespace = self._known.get(digest)
        return 0 if namespace is None else namespace.chunk_bytes.get(group, 0)

    def tenant_and_size(self, prefix: bytes) -> tuple[str | None, int]:
        """Of the chunks whose keys begin with this digest and group: their tenant, None if the
        document isn't known, and their bytes."""
        namespace = self._known.get(prefix[:DIGEST_BYTES])
        if namespace is None:
            return None, 0
        group = int.from_bytes(prefix[DIGEST_BYTES:], "big")
        return namespace.tenant, namespace.chunk_bytes.get(group, 0)

    def tenants(self, keys: Iterable[Key]) -> set[str]:
        """Of these chunks, as far as their namespaces are known."""
        found = map(self._known.get, {key[:DIGEST_BYTES] for key in keys})
        return {namespace.tenant for namespace in found if namespace is not None}

    def of_tenant(self, tenant: str) -> list[str]:
        """Digests of a tenant's namespaces."""
        return [
            digest.hex()
            for digest, namespace in self._known.items()
            if namespace is not None and namespace.tenant == tenant
        ]

    def are_visible(self, keys: Iterable[bytes], who: Identity) -> bool:
        """Whether all these keys are of tenants that `who` may know of."""
        digests = {key[:DIGEST_BYTES] for key in keys} if who.tenants is not None else ()
        return all(who.may_see(self._known.get(digest)) for digest in digests)

    def require_visible(self, keys: Iterable[bytes], who: Identity) -> None:
        """Raises `Forbidden` if not; it doesn't say whether there is such a namespace."""
        if not self.are_visible(keys, who):
            raise Forbidden(f"token {who.name!r} is for other tenants than some of these keys")

    def page(self, after: str | None, limit: int, who: Identity) -> api.NamespaceList:
        digests = sorted(d.hex() for d, document in self._known.items() if who.may_see(document))
        rest = [digest for digest in digests if after is None or digest > after]
        shown = [self._info(digest) for digest in rest[:limit]]
        more = shown[-1].digest if len(rest) > limit else None
        return api.NamespaceList(namespaces=shown, next=more)

    def _info(self, digest: str) -> api.NamespaceInfo:
        namespace = self._known[bytes.fromhex(digest)]
        document = None if namespace is None else msgspec.json.decode(namespace.document)
        return api.NamespaceInfo(digest=digest, document=document)
