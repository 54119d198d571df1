"""`kvstrata lookup KEY...`: which nodes hold these chunks, and in which tier."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvstrata import api
from kvstrata.cli.cluster import add_server, checked, connect, read_keys, show, table
from kvstrata.cli.flags import Parser
from kvstrata.errors import ConfigError

__all__ = ["main"]


def main(argv: list[str]) -> int:
    parser = Parser("kvstrata lookup", "Ask the control plane who holds some chunks.")
    parser.add_argument("keys", nargs="*", metavar="KEY", help="in hexadecimal; - reads stdin")
    parser.add_argument(
        "--all",
        action="store_true",
        help="the keys are a set; without it they are a chain, of which a prefix is of use",
    )
    parser.add_argument(
        "--tokens",
        metavar="FILE",
        help="in place of keys: token ids of a prompt, as JSON or apart by white space; - is stdin",
    )
    parser.add_argument("--model", help="of --tokens: hash them as this model's engines do")
    parser.add_argument("--revision", help="of --model: only this one; without it, all")
    parser.add_argument("--tenant", default="", help="of --model: the tenant salt, if there is one")
    parser.add_argument("--namespace", help="of --tokens: in place of a model, a digest")
    parser.add_argument("--node", action="append", metavar="ID", help="ask about this node only")
    add_server(parser)
    options = parser.parse_args(argv)
    request = _request(options)
    with connect(options) as control:
        reply = control.lookup(request)
    if options.json:
        print(reply.model_dump_json(indent=2))
        return 0
    rows = table(
        f"keys asked: {reply.keys}", "node", ">prefix", ">tokens", "tiers: found (prefix)", ">age"
    )
    for node in reply.nodes:
        tiers = ", ".join(f"{name}: {t.found} ({t.prefix})" for name, t in node.tiers.items())
        tokens = "?" if node.tokens is None else str(node.tokens)
        rows.add_row(node.node, str(node.prefix), tokens, tiers, f"{node.age:.1f} s")
    if reply.nodes:
        show(rows)
    else:
        print(f"keys asked: {reply.keys}; no node holds any of them")
    return 0


def _request(options: argparse.Namespace) -> api.LookupRequest | api.TokenLookup:
    if bool(options.keys) == bool(options.tokens):
        raise ConfigError("give keys, or --tokens with a file of token ids")
    if options.keys:
        keys = read_keys(options.keys)
        mode = "all" if options.all else "prefix"
        with checked():
            return api.LookupRequest(keys=keys, mode=mode, nodes=options.node)
    if options.all:
        raise ConfigError("--all is of keys: a prompt is a chain")
    if bool(options.model) == bool(options.namespace):
        raise ConfigError("say whose token ids these are: --model or --namespace")
    ids = _token_ids(options.tokens)
    with checked():
        prompt: api.ModelTokens | api.NamespaceTokens
        if options.namespace:
            prompt = api.NamespaceTokens(namespace=options.namespace, token_ids=ids)
        else:
            prompt = api.ModelTokens(
                model=options.model,
                revision=options.revision,
                tenant=options.tenant,
                token_ids=ids,
            )
        return api.TokenLookup(tokens=prompt, nodes=options.node)


def _token_ids(path: str) -> list[int]:
    """Raises `ConfigError` if there are none."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"--tokens {path}: {e}") from e
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [*map(int, text.split())]
    except ValueError as e:
        raise ConfigError(f"--tokens {path} has no token ids: {e}") from e
    if not all(type(each) is int for each in ids):
        raise ConfigError(f"--tokens {path} has no token ids: a list of whole numbers is wanted")
    return ids
