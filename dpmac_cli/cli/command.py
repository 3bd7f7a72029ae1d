"""A command that knows what other tools call its options."""

from typing import Any

from typer.core import TyperCommand

from dpmac_cli.config import OTHER_NAMES


class Command(TyperCommand):
    """Says how an option is called here that goes by another name elsewhere."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of any command; exits with a usage error where one of those names was typed."""
        ours = {name for parameter in self.params for name in parameter.opts}
        for typed in (arg.partition("=")[0] for arg in args):
            known = f"--{OTHER_NAMES.get(typed.removeprefix('--').replace('_', '-'))}"
            if typed.startswith("--") and known in ours:
                ctx.fail(f"No such option: {typed}. Here it is called {known}.")
        return super().parse_args(ctx, args)
