"""A verb group that is also a verb: where no verb of it is named, its first one is meant."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class DefaultGroup(TyperGroup):
    """`eyas bench --model ...` is `eyas bench measure --model ...`, help included.

    Only what begins with a dash goes to the first verb, so a mistyped verb is still reported as one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0].startswith("-"):
            args = [self.list_commands(ctx)[0], *args]
        return super().parse_args(ctx, args)
