"""An engine in a process of its own, so that it can be killed and started again for real."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvstrata.client import Client
from kvstrata.errors import Expired, KVStrataError, LinkBroken
from kvstrata_adapters.engines.numpy_decoder import (
    DecoderConfig,
    DecoderModel,
    GenerateResult,
    NumpyEngine,
)

__all__ = ["EngineProcess"]

_START = 60.0
_ANSWER = 120.0


class EngineProcess:
    """A `NumpyEngine` on the node at `socket`. Killed with the block."""

    def __init__(self, name: str, socket: Path, config: DecoderConfig) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, name, socket, config), name=name, daemon=True
        )
        self._process.start()
        theirs.close()  # so that its death is the end of the pipe
        self._receive(_START)

    def generate(self, tokens: Sequence[int], n: int) -> GenerateResult:
        """Raises what the engine raised, `LinkBroken` if it died, `Expired` if it takes long."""
        try:
            self._connection.send((list(tokens), n))
        except OSError as e:
            raise LinkBroken(f"engine {self.name} is gone") from e
        answer = self._receive(_ANSWER)
        if not isinstance(answer, GenerateResult):
            raise LinkBroken(f"engine {self.name} gave no result")
        return answer

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say goodbye to the node. Idempotent."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _receive(self, timeout: float) -> Any:
        try:
            if not self._connection.poll(timeout):
                raise Expired(f"engine {self.name} did not answer within {timeout:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError) as e:
            raise LinkBroken(f"engine {self.name} is gone") from e
        if isinstance(answer, KVStrataError):
            raise answer
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


def _serve(connection: Connection, name: str, socket: Path, config: DecoderConfig) -> None:
    """The process: one request after another until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us
    with contextlib.suppress(EOFError, OSError):
        try:
            model = DecoderModel(config)
            namespace = NumpyEngine.namespace_for(model)
            with Client.connect(socket, name, namespace=namespace) as client:
                engine = NumpyEngine(model, config.max_tokens // config.block_tokens, client)
                connection.send(None)
                while True:
                    connection.send(engine.generate(*connection.recv()))
        except KVStrataError as e:
            connection.send(e)
