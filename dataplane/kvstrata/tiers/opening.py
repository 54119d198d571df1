"""The tiers that a node's settings name: opened, labelled and wrapped."""

from __future__ import annotations

from importlib.metadata import entry_points

from kvstrata.config import TierSettings
from kvstrata.plugins import load_class
from kvstrata.tiers.base import Tier, TierContext
from kvstrata.tiers.wrappers.base import Wrapper

__all__ = ["open_tier"]


async def open_tier(settings: TierSettings, context: TierContext) -> tuple[Tier, str]:
    """The tier that `settings.type` names, in its wrappers, and what its kind calls itself.

    Raises `ConfigError` on what can't work; then nothing stays open.
    """
    wrappers = [
        (load_class("wrapper", wrap.type, Wrapper, _known("wrappers")), wrap.options)
        for wrap in settings.wrap
    ]
    found = load_class("tier type", settings.type, Tier, _known("tiers"))
    tier = await found.open(settings.options, context)
    kind = tier.name
    try:
        if settings.name:
            tier.name = settings.name
        for wrapper, options in wrappers:
            tier = wrapper.wrap(tier, options, context)
    except BaseException:
        await tier.close()
        raise
    return tier, kind


def _known(group: str) -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group=f"kvstrata.{group}")}
