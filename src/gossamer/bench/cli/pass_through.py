"""A command that passes the arguments after `--` to a script."""

from typing import Any

import typer
from typer.core import TyperCommand

ARGUMENTS = "gossamer.script.arguments"


class PassThrough(TyperCommand):
    """Command that keeps the arguments after `--` for a script, so that the parser does not read them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            args, ctx.meta[ARGUMENTS] = args[:cut], args[cut + 1 :]
        return super().parse_args(ctx, args)


def arguments(ctx: typer.Context) -> list[str]:
    """Arguments after `--`."""
    found: list[str] = ctx.meta.get(ARGUMENTS, [])
    return found
