"""List of the commands."""

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dpmac_cli import __version__
from dpmac_cli.cli import account, compare, data_commands, evaluate, recipes, runs, train, tune
from dpmac_cli.cli.failures import reports_failures
from dpmac_cli.config.fields import options
from dpmac_cli.config.flags import other_names
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.studies.grid import StudyFlags

#: Names of options in torch, Opacus and TensorFlow Privacy, and other common names.
OTHER_NAMES = {**other_names(SETTINGS), **other_names(options(StudyFlags))}


def _plain_switches(parameters: list[Any]) -> list[Any]:
    """Return parameters, with no placeholder for the value of a switch, which has none."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class Commands(TyperGroup):
    """The commands, with help in users' words."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the global options."""
        return _plain_switches(super().get_params(ctx))


class Command(TyperCommand):
    """A command that suggests its own option for the option name of another library."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the arguments and options."""
        return _plain_switches(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; exit with a usage error for the option name of another library."""
        ours = {name for parameter in self.params for name in parameter.opts}
        for typed in (arg.partition("=")[0] for arg in args):
            known = f"--{OTHER_NAMES.get(typed.removeprefix('--').replace('_', '-'))}"
            if typed.startswith("--") and known in ours:
                ctx.fail(f"No such option: {typed}. In dpmac it is called {known}.")
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="dpmac",
    cls=Commands,
    help="Train models under differential privacy, and compute privacy guarantees.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
for _name, _function in (
    ("train", train.train),
    ("account", account.account),
    ("compare", compare.compare),
    ("tune", tune.tune),
    ("eval", evaluate.evaluate),
    ("predict", evaluate.predict),
    ("card", evaluate.card),
    ("report", evaluate.report),
    ("recipes", recipes.recipes),
    ("runs", runs.runs),
    ("schema", data_commands.schema),
    ("cache", data_commands.cache),
):
    app.command(_name, cls=Command)(reports_failures(_function))


def _version(value: bool) -> None:
    if value:
        print(f"dpmac {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Parse global options."""
    del version
