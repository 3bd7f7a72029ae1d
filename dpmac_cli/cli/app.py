"""The commands."""

from typing import Annotated

import typer

from dpmac_cli import __version__
from dpmac_cli.cli import account, compare, doctor, evaluate, runs, train
from dpmac_cli.cli.command import Command

app = typer.Typer(
    name="dpmac",
    help="Train image classifiers under differential privacy, and say what that privacy is worth.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("train", cls=Command, help=train.HELP)(train.train)
app.command("account", cls=Command, help=account.HELP)(account.account)
app.command("compare", cls=Command, help=compare.HELP)(compare.compare)
app.command("eval", cls=Command, help=evaluate.HELP)(evaluate.evaluate)
app.command("runs", cls=Command, help=runs.HELP)(runs.runs)
app.command("doctor", cls=Command, help=doctor.HELP)(doctor.doctor)


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
    """Options before a command."""
    del version
