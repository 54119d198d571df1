"""The tier of docs/writing-a-tier.md passes the suite, as the page says and shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvstrata.testing.tier_hooks import TierHooks

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-tier.md").read_text()
TIER, SUITE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)

page: dict[str, Any] = {"__name__": "page"}
exec(compile(TIER + SUITE, "docs/writing-a-tier.md", "exec"), page)
TestSqliteTier = page["TestSqliteTier"]


def test_it_is_short() -> None:
    code = [line for line in TIER.splitlines() if line.strip()]
    assert len(code) <= 77
    assert "class SqliteTier(Tier):" in code


def test_every_hook_is_on_the_page() -> None:
    hooks = {name for name in vars(TierHooks) if not name.startswith(("_", "needs", "check", "do"))}
    fixtures_and_parts = {"clock", "removed", "context", "tier", "key", "item", "items", "chain"}
    sizes = {"sizes", "size", "blank"}
    for hook in hooks - fixtures_and_parts - sizes:
        assert f"`{hook}" in PAGE, hook
