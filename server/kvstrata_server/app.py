"""The control plane as a FastAPI app, and `kvstrata server`."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from kvstrata.addresses import split_address
from kvstrata.cli.flags import settings_from
from kvstrata.config import ServerSettings
from kvstrata.errors import ConfigError
from kvstrata.standard_input import at_end_of_stdin
from kvstrata_server import openapi, problems
from kvstrata_server.access.auth import Gate, authorize
from kvstrata_server.access.body_limit import BodyLimit
from kvstrata_server.access.no_nul import NoNul
from kvstrata_server.clock import Clock, SteadyClock
from kvstrata_server.metrics import Timing
from kvstrata_server.plane import ControlState
from kvstrata_server.routes import (
    audit,
    bulk,
    compat,
    drains,
    evictions,
    health,
    leases,
    nodes,
    placements,
    prefetches,
    quotas,
    stream,
    transfers,
)
from kvstrata_server.routes.parameters import require_known

__all__ = ["create_app", "main"]

MAX_BODY_BYTES = 64 << 20
_GRACE = 5


def create_app(settings: ServerSettings, clock: Clock | None = None) -> FastAPI:
    """The app; its lifespan opens the database, loads the index and runs the background tasks.

    `clock` gives seconds since the epoch and never goes back. Raises `ConfigError` on settings
    that can't work; the lifespan does on an address that others can reach without a token.
    """
    _check_tls(settings)
    state = ControlState(settings, clock or SteadyClock())

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await state.open()
        try:
            yield
        finally:
            await state.close()

    app = FastAPI(
        title="kvstrata control plane",
        version=version("kvstrata"),
        summary="Who holds which KV-cache chunk, and moving chunks to where they will be used",
        lifespan=lifespan,
        docs_url=None,  # it would load scripts from a CDN
        redoc_url=None,
        generate_unique_id_function=_operation_id,
        dependencies=[Depends(authorize), Depends(require_known)],
    )
    app.state.control = state
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    problems.install(app)
    app.router.routes.extend(bulk.ROUTES)
    for module in (
        nodes,
        placements,
        transfers,
        prefetches,
        leases,
        evictions,
        drains,
        quotas,
        audit,
        compat,
        stream,
        health,
    ):
        app.include_router(module.router)

    # The last one added is asked first.
    app.add_middleware(BodyLimit, most=MAX_BODY_BYTES)
    app.add_middleware(NoNul)
    app.add_middleware(Gate, state=state)
    app.add_middleware(Timing, metrics=state.metrics)
    return app


def main(argv: Sequence[str] | None = None) -> int:
    """`kvstrata server`: serve until SIGTERM, SIGINT or (`exit_with_stdin`) the end of standard
    input. Prints its address when it is ready."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = settings_from(ServerSettings, arguments, "kvstrata server")
        app = create_app(settings)
        with _listen(settings) as listener:
            asyncio.run(_serve(app, listener))
    except ConfigError as e:
        print(f"kvstrata server: {e}", file=sys.stderr)
        return 2
    return 0


async def _serve(app: FastAPI, listener: socket.socket) -> None:
    state: ControlState = app.state.control
    server = _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=_GRACE,
            ssl_certfile=state.settings.tls_cert,
            ssl_keyfile=state.settings.tls_key,
        ),
        on_shutdown=state.end_waits,
    )
    if state.settings.exit_with_stdin:
        at_end_of_stdin(asyncio.get_running_loop(), server.end)
    # Opened here rather than by uvicorn's lifespan, whose failures end the process without a word
    # of what to change.
    async with app.router.lifespan_context(app):
        # What is loaded now stays: the collector need not walk it over and over.
        gc.collect()
        gc.freeze()
        await server.serve(sockets=[listener])


class _Server(uvicorn.Server):
    """Says where it listens, and ends long polls before it waits for requests to finish."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again once it has served, which would end the process before
        # the queue of writes is flushed.
        loop = asyncio.get_running_loop()
        ends = (signal.SIGINT, signal.SIGTERM)
        for end in ends:
            loop.add_signal_handler(end, self.handle_exit, end, None)
        try:
            yield
        finally:
            for end in ends:
                loop.remove_signal_handler(end)

    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_shutdown = on_shutdown

    def end(self) -> None:
        """As a signal does."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            scheme = "https" if self.config.is_ssl else "http"
            print(f"kvstrata server: listening on {scheme}://{shown}:{port}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        await super().shutdown(sockets)


def _check_tls(settings: ServerSettings) -> None:
    if settings.tls_cert is None and settings.tls_key is None:
        return
    if settings.tls_cert is None or settings.tls_key is None:
        raise ConfigError("server.tls_cert and server.tls_key are needed both, or neither")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.tls_cert, settings.tls_key
        )
    except (OSError, ssl.SSLError) as e:
        raise ConfigError(
            f"server.tls_cert {settings.tls_cert} and server.tls_key {settings.tls_key} can't be "
            f"used: {e}. Both are PEM files that this user may read, and belong together"
        ) from e


def _listen(settings: ServerSettings) -> socket.socket:
    host, port = split_address(settings.listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as e:
        raise ConfigError(
            f"server.listen {settings.listen!r}: {e.strerror}. Choose another port or address"
        ) from e
    # Connections inherit it. asyncio sets it only where the protocol is named, which it isn't here,
    # and without it an answer's body waits for its head to be acknowledged: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _operation_id(route: APIRoute) -> str:
    return route.name
