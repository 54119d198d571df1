"""Which command, and how it ends.

A command is a function `main(argv) -> exit status`. Ours are named here; those of other packages
are found by the entry point group `kvstrata.commands`. Only the one asked for is imported, so
that `kvstrata --help` is quick and works with no extra installed.

Exit status: 0 done, 1 failed, 2 the command line or the settings can't work, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points, version

from kvstrata.errors import ConfigError, KVStrataError

__all__ = ["GROUP", "main"]

GROUP = "kvstrata.commands"

Command = Callable[[list[str]], int | None]

_BUILT_IN = {
    "node": "kvstrata.cli.node:main",
    "lookup": "kvstrata.cli.lookup:main",
    "transfer": "kvstrata.cli.transfer:main",
    "drain": "kvstrata.cli.drain:main",
    "status": "kvstrata.cli.status:main",
    "quota": "kvstrata.cli.quota:main",
    "simulate": "kvstrata.cli.simulate:main",
    "fsck": "kvstrata.cli.fsck:main",
    "du": "kvstrata.cli.du:main",
}
_ABOUT = {
    "server": "run the control plane: who holds what, and transfers between nodes",
    "token": "make, list and revoke tokens for the control plane",
    "node": "run a node: the cache of one host, in memory and on disk",
    "demo": "see it work: an engine offloads, restarts and reloads; a second node fetches",
    "lookup": "ask the control plane who holds some chunks",
    "transfer": "have chunks moved to a node",
    "drain": "make it safe to stop a node: what only it holds goes elsewhere first",
    "status": "show a node or the cluster",
    "quota": "how much tenants may hold and move, and what they do",
    "simulate": "replay a trace of requests: hit rate by policy and capacity",
    "fsck": "verify a store, report what is wrong with it, repair it",
    "du": "what a store is used for: by namespace, tenant and age",
}
_EXTRAS = {"server": "server", "token": "server", "demo": "server"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Never raises a `KVStrataError`."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args[0] if args else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    if name in ("-V", "--version"):
        print(f"kvstrata {version('kvstrata')}")
        return 0
    try:
        command = _find(name)
        return _run(f"kvstrata {name}", command, args[1:])
    except KVStrataError as e:
        return _fail("kvstrata", str(e), 2)
    except KeyboardInterrupt:  # also while the command is imported, which may take seconds
        return 130


def _find(name: str) -> Command:
    """The command's function. Raises `ConfigError` saying what to install or type."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        found: Command = getattr(import_module(module), attribute)
        return found
    plugin = next(iter(entry_points(group=GROUP, name=name)), None)
    if plugin is None:
        raise ConfigError(f"no command {name!r}: type one of {', '.join(sorted(_names()))}")
    return _load(plugin)


def _load(plugin: EntryPoint) -> Command:
    try:
        found: Command = plugin.load()
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("kvstrata"):
            raise
        extra = _EXTRAS.get(plugin.name)
        do = f"pip install 'kvstrata[{extra}]'" if extra else f"install {e.name}"
        raise ConfigError(f"`kvstrata {plugin.name}` needs {e.name}: {do}") from e
    return found


def _run(prog: str, command: Command, args: list[str]) -> int:
    try:
        status = command(args) or 0
        sys.stdout.flush()
        return status
    except ConfigError as e:
        return _fail(prog, str(e), 2)
    except KVStrataError as e:
        return _fail(prog, str(e), 1)
    except SystemExit as e:  # argparse, after --help or a usage error
        return e.code if isinstance(e.code, int) else 1
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter's own flush at exit quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        if e.filename is None:
            raise
        # A file of the operator's, as the directory of `--socket`; without a name it is our bug.
        told = f"{e.filename}: {e.strerror}: choose another path, or make it one this user may use"
        return _fail(prog, told, 1)


def _fail(prog: str, message: str, status: int) -> int:
    print(f"{prog}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _names() -> set[str]:
    return set(_BUILT_IN) | entry_points(group=GROUP).names


def _help() -> str:
    names = [name for name in _ABOUT if name in _names()]
    names += sorted(_names() - set(names))
    lines = [f"  {name:<9} {_ABOUT.get(name, 'from another package')}" for name in names]
    return "\n".join(
        [
            "usage: kvstrata COMMAND [OPTION ...]",
            "",
            "A tiered KV-cache store for LLM inference.",
            "",
            "commands:",
            *lines,
            "",
            "`kvstrata COMMAND --help` lists the options of one command; --version tells ours.",
        ]
    )
