"""Commands that know what other tools call their options, and show all of them alike."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperArgument, TyperCommand, TyperGroup

from dpmac_cli.cli.console import ATTENTION
from dpmac_cli.config import OTHER_NAMES


class Group(TyperGroup):
    """The commands, with their own options shown as those of each command are."""

    def get_params(self, ctx: Any) -> list[Any]:
        """As of any group."""
        return _alike(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As of any group."""
        _readable()
        super().format_help(ctx, formatter)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """As of any group."""
        with _readable_errors():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """As of any group."""
        with _readable_errors():
            return super().invoke(ctx)


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

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """As of any command."""
        _readable()
        super().format_help(ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """As of any command; typer puts what is required into braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


def _alike(parameters: list[Any]) -> list[Any]:
    """Parameters whose values are named in capitals: typer names its own kinds, <bool> too."""
    for parameter in parameters:
        if isinstance(parameter, TyperArgument):
            # typer has no setting for this of an argument; each of ours is a path.
            parameter.display_type_rich = lambda ctx: "PATH"  # type: ignore[method-assign]
        elif getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Where usage is wrong, typer prints why."""
    try:
        yield
    except Exception:  # of whatever kind: it goes on its way
        _readable()
        raise


def _readable() -> None:
    """Take from typer the colours that are too faint on a light screen."""
    from typer import rich_utils  # noqa: PLC0415  (loads a Markdown parser)

    rich_utils.STYLE_OPTION = rich_utils.STYLE_SWITCH = "bold"
    rich_utils.STYLE_COMMANDS_TABLE_FIRST_COLUMN = "bold"
    rich_utils.RICH_HELP = rich_utils.RICH_HELP.replace("[blue]", "[bold]")
    rich_utils.STYLE_TYPES = rich_utils.STYLE_USAGE = ATTENTION
