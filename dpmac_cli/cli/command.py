"""Commands that know what other tools call their options, and show all of them alike."""

from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from dpmac_cli.config import OTHER_NAMES


class Group(TyperGroup):
    """The commands, with their own options shown as those of each command are."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As of any group."""
        return _alike(super().get_params(ctx))


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

    def get_params(self, ctx: Any) -> list[Any]:
        """As of any command."""
        return _alike(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As of any command; typer puts what is required into braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


def _alike(parameters: list[Any]) -> list[Any]:
    """Parameters whose values are named in capitals: typer names its own kinds, <bool> too."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: "PATH"  # type: ignore[method-assign]
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters
