"""A command that recognizes the names that other libraries give to its options."""

from typing import Any

from typer.core import TyperCommand

from dpmac_cli.config.resolve import OTHER_NAMES


class Command(TyperCommand):
    """A command that names its own option when the user types another library's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; exit with a usage error if one is another library's name."""
        ours = {name for parameter in self.params for name in parameter.opts}
        for typed in (arg.partition("=")[0] for arg in args):
            known = f"--{OTHER_NAMES.get(typed.removeprefix('--').replace('_', '-'))}"
            if typed.startswith("--") and known in ours:
                ctx.fail(f"No such option: {typed}. Here it is called {known}.")
        return super().parse_args(ctx, args)
