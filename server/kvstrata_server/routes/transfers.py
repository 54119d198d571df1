"""Scheduled movements of chunks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from kvstrata import api
from kvstrata.api.base import NO_NUL
from kvstrata.errors import Busy, Missing
from kvstrata_server.access.roles import Identity
from kvstrata_server.examples.world import TRANSFER
from kvstrata_server.lookups.prompts import needed_keys
from kvstrata_server.placement.cluster import digests_of
from kvstrata_server.plane import ControlState
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import PLANNED, After, IdempotencyKey, Limit, State, Who
from kvstrata_server.routes.sse import NOTHING_NEW, SILENCE, STREAM, EventStream, Standing, event
from kvstrata_server.scheduling.history import Wanted
from kvstrata_server.scheduling.shown import Shown
from kvstrata_server.tenancy.tenants import LONGEST_NAME, NAME_PATTERN

router = APIRouter(prefix="/v1/transfers", tags=["transfers"])

TransferId = Annotated[str, Path(max_length=64, examples=[TRANSFER])]
InState = Annotated[
    list[api.TransferState] | None,
    Query(
        alias="state",
        max_length=len(api.TransferState),
        description="Only those in this state, or in one of several: `state=queued&state=running`",
    ),
]
Target = Annotated[
    str | None, Query(max_length=128, pattern=NO_NUL, description="Only those to this node")
]
OfTenant = Annotated[
    str | None,
    Query(
        min_length=1,
        max_length=LONGEST_NAME,
        pattern=NAME_PATTERN,
        description="Only those that take their turns as this tenant's, whose first key is: called "
        "as in `/v1/quotas`",
    ),
]


@router.post(
    "",
    summary="Move chunks to a node",
    status_code=202,
    response_model=api.TransferInfo,
    responses={**PLANNED, **responses(404, 409, 503, 507)},
)
async def create_transfer(
    request: api.Transfer, state: State, who: Who, idempotency_key: IdempotencyKey = None
) -> Response:
    """Ask a node to fetch chunks from others. The answer is the transfer, accepted and kept; read
    it again for its outcome per key. Keys that nobody holds are outcomes, not errors. Of token ids
    it is what an engine needs to go on after them: of a window the last chunks, of states one."""
    if isinstance(request, api.TokenTransfer):
        keys = await asked_keys(request, state, who)
        terms = {name: value for name, value in request if name != "tokens"}
        request = api.TransferRequest.model_construct(keys=keys, **terms)
    return await accepted(await make(request, state, who, idempotency_key))


@router.get(
    "",
    summary="List transfers",
    responses=responses(503),
)
async def list_transfers(
    state: State,
    after: After = None,
    limit: Limit = 100,
    in_state: InState = None,
    target: Target = None,
    tenant: OfTenant = None,
) -> api.TransferList:
    """Oldest first, with counts in place of keys: all of them, or those that pass each filter."""
    namespaces: list[str] | None = None
    if tenant is not None:
        namespaces = state.namespaces.of_tenant(api.tenant_from_name(tenant))
    return await state.transfers.page(after, limit, Wanted(in_state, target, namespaces))


@router.get(
    "/{transfer_id}",
    summary="See what became of a transfer",
    response_model=api.TransferInfo,
    responses=responses(404, 503),
)
async def get_transfer(transfer_id: TransferId, state: State, who: Who) -> Response:
    """State, and the outcome per key."""
    await require_seen(transfer_id, state, who)
    return answer(await (await state.transfers.get(transfer_id)).json())


@router.delete(
    "/{transfer_id}",
    summary="Cancel a transfer",
    response_model=api.TransferInfo,
    responses=responses(404, 503),
)
async def cancel_transfer(transfer_id: TransferId, state: State, who: Who) -> Response:
    """Cancel it. One that has ended stays as it is; what it holds at its target is released."""
    await require_seen(transfer_id, state, who)
    return answer(await (await state.transfers.cancel(transfer_id)).json())


@router.get(
    "/{transfer_id}/events",
    summary="Follow a transfer",
    response_class=Response,
    responses={**responses(404, 503), **STREAM},
)
async def watch_transfer(
    transfer_id: TransferId, state: State, who: Who, standing: Standing
) -> Response:
    """Server-sent events: `transfer`, with the transfer as a list has it, now and at each change.
    The stream ends after the event with an ended state. One that was cut off is asked for again,
    at any server: it begins with what is so then."""
    await require_seen(transfer_id, state, who)
    await state.transfers.summary(transfer_id)
    return EventStream(_changes(transfer_id, state, standing))


async def _changes(
    transfer_id: str, state: ControlState, standing: Callable[[], bool]
) -> AsyncGenerator[str]:
    """Until its end, or that of the server, or the token is none any more (`standing`)."""
    told: api.TransferSummary | None = None
    with state.transfers.watching(transfer_id) as news:
        while not state.transfers.closing and standing():
            news.clear()
            try:
                now = await state.transfers.summary(transfer_id)
            except Missing:
                return  # forgotten meanwhile
            except Busy:
                pass  # the database is away: later
            else:
                if now != told:
                    yield event("transfer", now.model_dump(mode="json"))
                    told = now
                if now.state.ended:
                    return
            try:
                async with asyncio.timeout(SILENCE):
                    await news.wait()
            except TimeoutError:
                yield NOTHING_NEW


async def asked_keys(
    request: api.Transfer | api.Prefetch | api.Lease, state: ControlState, who: Identity
) -> list[str]:
    """As they were given, or those that the token ids need. Raises as `needed_keys` does."""
    if isinstance(request, api.TransferRequest | api.PrefetchRequest | api.LeaseRequest):
        return request.keys
    return await needed_keys(state.namespaces, who, state.settings.hash_seeds, request.tokens)


async def make(
    request: api.TransferRequest, state: ControlState, who: Identity, idempotency_key: str | None
) -> Shown:
    """Raises `Forbidden` for keys of tenants that `who` may not know of, and as `Scheduler.create`
    does."""
    if who.tenants is not None:
        state.namespaces.require_visible(digests_of(request.keys), who)
        # What others named their requests is none of theirs to find out.
        idempotency_key = idempotency_key and _own(idempotency_key, who)
    return await state.transfers.create(request, idempotency_key, state.admission)


async def accepted(transfer: Shown) -> Response:
    """Where it is to be seen; of a dry run, which is nowhere, just what is planned."""
    content = await transfer.json()
    if transfer.state is api.TransferState.PLANNED:
        return answer(content, 200)
    return answer(content, 202, {"Location": f"/v1/transfers/{transfer.id}"})


def answer(content: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Of a route whose answer is written already (`Shown`)."""
    return Response(content, status, headers, media_type="application/json")


def _own(idempotency_key: str, who: Identity) -> str:
    """Of this token and no other, however long, and whatever is in names."""
    return hashlib.sha256(f"{len(who.name)}:{who.name}:{idempotency_key}".encode()).hexdigest()


async def require_seen(transfer_id: str, state: ControlState, who: Identity) -> None:
    """Raises `Missing` for what other tenants move, as if it weren't there."""
    if who.tenants is not None:
        transfer = await state.transfers.find(transfer_id)
        if not state.namespaces.are_visible(transfer.keys, who):
            raise Missing(f"no transfer {transfer_id!r}, or it ended too long ago")
