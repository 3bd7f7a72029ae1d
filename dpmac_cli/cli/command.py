"""A command as typer runs it, made from its function."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand

from dpmac_cli.cli.failures import reports_failures
from dpmac_cli.cli.switches import plain_switches
from dpmac_cli.config.gone import instead


class Command(TyperCommand):
    """A command that suggests what to type instead of options of other libraries or versions."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return plain_switches(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; exit with a usage error for an option that has another name here."""
        ours = {name for parameter in self.params for name in parameter.opts}
        known = {name.removeprefix("--").replace("-", "_") for name in ours}
        for typed in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            if typed not in ours and (said := instead(typed[2:], known)):
                ctx.fail(f"No such option: {typed}.{said.replace('called ', 'called --')}")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options by group, without boxes, which would take most of the time of help."""
        groups: dict[str, list[Any]] = {}
        for parameter in self.get_params(ctx):
            named = getattr(parameter, "rich_help_panel", None) or "Options"
            of = "Arguments" if parameter.param_type_name == "argument" else named
            groups.setdefault(of, []).append(parameter.get_help_record(ctx))
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def command_of(name: str, function: Callable[..., None]) -> TyperCommand:
    """Return the command ``name``, which calls a function and reports its failures."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(reports_failures(function))
    built: Any = typer.main.get_command(alone)  # of its only command, so of its class
    found: TyperCommand = built
    return found
