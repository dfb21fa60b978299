"""A command after whose own words, and `--`, a script's may come."""

from typing import Any

import typer
from typer.core import TyperCommand

ARGUMENTS = "gossamer.script.arguments"


class PassThrough(TyperCommand):
    """Keeps what comes after `--` apart; the parser would take it for more of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            args, ctx.meta[ARGUMENTS] = args[:cut], args[cut + 1 :]
        return super().parse_args(ctx, args)


def arguments(ctx: typer.Context) -> list[str]:
    """What came after `--`."""
    found: list[str] = ctx.meta.get(ARGUMENTS, [])
    return found
