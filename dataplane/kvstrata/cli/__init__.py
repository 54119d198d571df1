"""The command `kvstrata`. Top floor: nothing in the library imports it."""

from kvstrata.cli.dispatch import main

__all__ = ["main"]
