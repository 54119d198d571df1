"""Routes by which clients of Dynamo's indexer, or of Mooncake's conductor, may ask us instead.

Both shapes of a question are understood, and each is answered in its own. Errors are problem
documents like all of ours, with the status codes that those clients know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Query, Request, Response
from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    RootModel,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from kvstrata.api.base import MAX_KEYS, NO_NUL
from kvstrata.errors import Malformed
from kvstrata.keys import Namespace
from kvstrata_server.access.answered import acts_on
from kvstrata_server.access.roles import Identity
from kvstrata_server.lookups.compat import DEFAULT_TENANT, Asked, Overlap, overlaps
from kvstrata_server.lookups.prompts import hashed, namespaces_of_model, sequenced
from kvstrata_server.plane import ControlState
from kvstrata_server.problems import responses
from kvstrata_server.routes.parameters import COMPATIBLE, State, Who

router = APIRouter(tags=[COMPATIBLE])

_MOST_TOKENS = 1 << 20


def _number(value: Any) -> Any:
    if isinstance(value, bool | str):
        raise ValueError("a number is wanted")
    return value


def _numbers(value: Any) -> Any:
    """Of a whole list at once: a prompt may have a million tokens."""
    if isinstance(value, list) and not {*map(type, value)} <= {int, float}:
        raise ValueError("numbers are wanted")
    return value


# `true` is no number, whatever pydantic takes it for.
_WHOLE = BeforeValidator(_number)
_WHOLES = BeforeValidator(_numbers)
# Validators of JSON Schema compare as doubles do: the next one is 2^64.
_MOST_U64 = (1 << 64) - (1 << 11)
_U64 = Annotated[int, Field(ge=-(1 << 63), le=_MOST_U64)]
_Text = Annotated[str, Field(max_length=512)]
_Name = Annotated[str, Field(min_length=1, max_length=512)]
_Id = Annotated[int, Field(ge=0), _WHOLE] | Annotated[str, Field(min_length=1, max_length=128)]
_Model = Annotated[_Name, Field(validation_alias=AliasChoices("model_name", "model", "modelname"))]
_TENANT = AliasChoices("tenant_id", "routing_group")
_Tenant = Annotated[_Text, Field(validation_alias=_TENANT)]


class _Asked(BaseModel):
    # Fields that only one of them knows are no errors.
    model_config = ConfigDict(extra="ignore", use_attribute_docstrings=True)


class InstanceRegistration(_Asked):
    """POST /register"""

    instance_id: _Id
    endpoint: _Name
    """Where a node publishes its KV events."""
    model_name: _Model
    block_size: Annotated[int, Field(ge=1, lt=1 << 31), _WHOLE]
    dp_rank: Annotated[int, Field(ge=0, lt=1 << 31), _WHOLE] | None = None
    replay_endpoint: _Text | None = None
    """Not used: a node says itself where it replays."""
    tenant_id: _Tenant = DEFAULT_TENANT


class InstanceRemoval(_Asked):
    """POST /unregister"""

    instance_id: _Id
    model_name: _Model
    dp_rank: Annotated[int, Field(ge=0, lt=1 << 31), _WHOLE] | None = None
    tenant_id: Annotated[_Text | None, Field(validation_alias=_TENANT)] = None


class _Query(_Asked):
    model_name: _Model
    tenant_id: _Tenant = DEFAULT_TENANT
    """Chunks of the namespaces with this tenant; `default`: of those with none."""
    instance_id: _Id | None = None
    """Only of this one."""
    mooncake: SkipJsonSchema[bool] = False
    """Not sent: whether the question has Mooncake's shape, which says `model`."""

    @model_validator(mode="before")
    @classmethod
    def _whose(cls, asked: Any) -> Any:
        if isinstance(asked, dict):
            return asked | {"mooncake": "model" in asked and "model_name" not in asked}
        return asked


class PrefixQuery(_Query):
    """POST /query"""

    token_ids: Annotated[
        list[Annotated[int, Field(ge=0, lt=1 << 32)]], Field(max_length=_MOST_TOKENS), _WHOLES
    ]
    block_size: Annotated[int, Field(ge=1, lt=1 << 31), _WHOLE] | None = None
    lora_name: _Text | None = None
    cache_salt: _Text | None = None


class HashQuery(_Query):
    """POST /query_by_hash: one of the two lists. Only for namespaces that hash by `xxh3`."""

    block_hashes: Annotated[list[_U64], Field(max_length=MAX_KEYS), _WHOLES] | None = None
    """Dynamo's: of each block by itself."""
    seq_hashes: Annotated[list[_U64], Field(max_length=MAX_KEYS), _WHOLES] | None = None
    """Mooncake's: of each block together with all before it."""


class Done(BaseModel):
    status: str = "ok"


class InstanceOverlap(BaseModel):
    """Of one instance, in tokens; cumulative from tier to tier."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]
    cpu: int
    disk: int


class MooncakeOverlap(BaseModel):
    longest_matched: int
    GPU: int
    DP: dict[str, int]
    CPU: int
    DISK: int


class PrefixAnswer(BaseModel):
    """Dynamo's. `scores` and `frequencies` count what is on devices, so are empty."""

    scores: dict[str, dict[str, int]]
    frequencies: list[int]
    instances: dict[str, InstanceOverlap]


class MooncakeTenant(RootModel[dict[str, MooncakeOverlap]]):
    """Instance -> what it has."""


class MooncakeAnswer(RootModel[dict[str, MooncakeTenant]]):
    """Tenant -> its instances."""


class Dump(RootModel[dict[str, Any]]):
    """`model:tenant` -> block size and router events, in Dynamo's form."""


class Listener(BaseModel):
    endpoint: str
    status: str


class Worker(BaseModel):
    """A registered instance."""

    instance_id: int | str
    source: str
    status: str
    model_name: str
    routing_group: str
    block_size: int
    endpoints: dict[str, str]
    listeners: dict[str, Listener]


@router.post(
    "/register",
    summary="Call a node by the name that a router knows",
    status_code=201,
    responses=responses(404, 409, 503),
)
async def register_instance(asked: InstanceRegistration, request: Request, state: State) -> Done:
    """Call the node that publishes its KV events at `endpoint` by this id in answers."""
    acts_on(request, _worker(asked))
    state.instances.register(
        Asked(
            str(asked.instance_id),
            asked.model_name,
            asked.tenant_id,
            asked.dp_rank or 0,
            asked.endpoint,
            asked.block_size,
        )
    )
    return Done()


@router.post(
    "/unregister",
    summary="Forget the name of a node",
    responses=responses(404, 503),
)
async def unregister_instance(asked: InstanceRemoval, request: Request, state: State) -> Done:
    """Forget an instance, or one rank of it."""
    acts_on(request, _worker(asked))
    state.instances.unregister(
        str(asked.instance_id), asked.model_name, asked.tenant_id, asked.dp_rank
    )
    return Done()


@router.post(
    "/query",
    summary="Ask how much of a prompt each instance has",
    responses=responses(404),
)
async def query_prefix(asked: PrefixQuery, state: State, who: Who) -> PrefixAnswer | MooncakeAnswer:
    """How much of a prompt each instance has. Hashes the tokens as the engines do."""
    namespaces = _namespaces(state, who, asked)
    sizes = {g.tokens_per_block for n in namespaces for g in n.groups}
    if asked.block_size is not None and asked.block_size not in sizes:
        raise Malformed(f"{asked.model_name} has blocks of {sorted(sizes)} tokens")
    lora, salt = asked.lora_name or "", asked.cache_salt or ""
    prompts = await hashed(namespaces, asked.token_ids, state.settings.hash_seeds, lora, salt)
    return _answer(state, asked, await overlaps(state.cluster, prompts.each))


@router.post(
    "/query_by_hash",
    summary="Ask the same by hashes of blocks",
    responses=responses(404),
)
async def query_prefix_by_hash(
    asked: HashQuery, state: State, who: Who
) -> PrefixAnswer | MooncakeAnswer:
    """The same of a prompt whose hashes the client has computed."""
    if (asked.block_hashes is None) == (asked.seq_hashes is None):
        raise Malformed("give `block_hashes` (Dynamo's) or `seq_hashes` (Mooncake's), not both")
    namespaces = _namespaces(state, who, asked)
    hashes = asked.seq_hashes if asked.block_hashes is None else asked.block_hashes
    prompts = await sequenced(namespaces, hashes or (), asked.block_hashes is not None)
    return _answer(state, asked, await overlaps(state.cluster, prompts))


@router.get(
    "/workers",
    summary="List the registered instances",
    responses=responses(),
)
async def list_workers(
    state: State, model_name: Annotated[str | None, Query(pattern=NO_NUL)] = None
) -> list[Worker]:
    """All of them, or those of one model, and whether their nodes are up."""
    found: dict[tuple[str, str, str], Worker] = {}
    for instance in state.instances.all():
        if model_name not in (None, instance.model):
            continue
        status = "active" if state.instances.is_up(instance) else "silent"
        worker = found.setdefault(
            (instance.id, instance.model, instance.tenant),
            Worker(
                instance_id=int(instance.id) if instance.id.isdecimal() else instance.id,
                source="zmq",
                status=status,
                model_name=instance.model,
                routing_group=instance.tenant,
                block_size=instance.block_size,
                endpoints={},
                listeners={},
            ),
        )
        rank = str(instance.rank)
        worker.endpoints[rank] = instance.endpoint
        worker.listeners[rank] = Listener(endpoint=instance.endpoint, status=status)
    return list(found.values())


@router.get(
    "/dump",
    response_model=Dump,
    summary="Read what the registered instances hold",
    responses=responses(503),
)
async def dump(state: State) -> Response:
    """What the registered instances hold, as Dynamo's router events: for an indexer that starts
    with us as its peer. Asked of the nodes, which alone know the tokens."""
    # What FastAPI makes of a model takes ten times as long, for which all others would wait.
    answer = msgspec.json.encode(await state.dumps.take())
    return Response(answer, media_type="application/json")


def _namespaces(state: ControlState, who: Identity, asked: _Query) -> list[Namespace]:
    tenant = "" if asked.tenant_id == DEFAULT_TENANT else asked.tenant_id
    return namespaces_of_model(state.namespaces, who, asked.model_name, tenant)


def _worker(asked: InstanceRegistration | InstanceRemoval) -> str:
    """For the audit log."""
    names = {"model_name": asked.model_name, "instance_id": asked.instance_id}
    rank = {} if asked.dp_rank is None else {"dp_rank": asked.dp_rank}
    return f"/workers?{urlencode(names | rank)}"


def _answer(
    state: ControlState, asked: _Query, by_node: Mapping[str, Overlap]
) -> PrefixAnswer | MooncakeAnswer:
    names = state.instances.names(asked.model_name, asked.tenant_id)
    found: dict[str, tuple[Overlap, list[int]]] = {}
    for node, overlap in by_node.items():
        if not overlap.disk:
            continue
        for name, ranks in _names(node, names):
            if asked.instance_id is None or str(asked.instance_id) == name:
                found[name] = overlap, ranks
    if asked.mooncake:
        shown = {
            name: MooncakeOverlap(
                longest_matched=overlap.disk,
                GPU=0,
                DP={str(rank): 0 for rank in ranks},
                CPU=overlap.cpu,
                DISK=overlap.disk,
            )
            for name, (overlap, ranks) in found.items()
        }
        return MooncakeAnswer({asked.tenant_id: MooncakeTenant(shown)})
    return PrefixAnswer(
        scores={},
        frequencies=[],
        instances={
            name: InstanceOverlap(
                longest_matched=overlap.disk,
                gpu=0,
                dp={str(rank): 0 for rank in ranks},
                cpu=overlap.cpu,
                disk=overlap.disk,
            )
            for name, (overlap, ranks) in found.items()
        },
    )


def _names(node: str, names: Any) -> Iterable[tuple[str, list[int]]]:
    """What a node is called in answers, and its ranks under that name."""
    if names is None:
        return [(node, [0])]
    ranks: dict[str, list[int]] = {}
    for instance in names.get(node, ()):
        ranks.setdefault(instance.id, []).append(instance.rank)
    return ranks.items()
