"""List of the commands. Each is imported when it is called, which help need not wait for."""

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dpmac_cli import __version__

#: Commands that have a module of their name. The others are in ``scored`` and ``reading``.
WITH_MODULE = ("train", "account", "compare", "tune", "runs")
#: The commands, with the first paragraph of their help.
COMMANDS: Mapping[str, str] = {
    "train": "Train a model under differential privacy.",
    "account": (
        "Compute the privacy cost of training in advance, the noise for a budget, or the "
        "longest run."
    ),
    "compare": "Compare optimizers, noise levels or any other setting, over several seeds.",
    "tune": "Search for the best settings, within one epsilon for search and model together.",
    "eval": "Evaluate a trained model on every test sample, judge its audit, or attack its recipe.",
    "predict": "Predict classes or numbers of new records, or continue texts, by a trained model.",
    "card": "Print the model card of a run as Markdown.",
    "report": "Write a web page for a run or a comparison: one self-contained file with figures.",
    "recipes": (
        "List recipes: what each reaches, its epsilon, its time, and the command that runs it."
    ),
    "runs": (
        "List runs, the newest first: what was trained, its epsilon, its accuracy and how it ended."
    ),
    "schema": "Draft the schema of a table, which declares the allowed values of each column.",
    "cache": (
        "Show or clear the cache of decoded images, and of features of public backbones and "
        "frozen layers."
    ),
    "env": "Print what a bug report needs: versions, processor, libraries, folders and fallbacks.",
}


def load_command(name: str) -> TyperCommand:
    """Import the module of a command, and return the command with all of its options.

    Args:
        name: name of the command, a key of :data:`COMMANDS`, such as "eval".

    Raises:
        ModuleNotFoundError: a package that the command always needs is not installed.
    """
    from dpmac_cli.cli.options import built  # noqa: PLC0415  (help need not wait for it)

    if name in WITH_MODULE:
        module_name = name
    else:
        module_name = "scored" if name in ("eval", "predict") else "reading"
    module = importlib.import_module(f"dpmac_cli.cli.{module_name}")
    function = "evaluate" if name == "eval" else name  # eval is a function of Python
    return built(name, getattr(module, function))


class Commands(TyperGroup):
    """The group of all commands, which knows them by their summaries until one of them is called.

    So help, completion and messages about misspelt commands import no module of a command.
    click calls its methods.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, summary in COMMANDS.items():
            self.commands[name] = TyperCommand(name, help=summary)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands with their whole summaries, which typer would cut.

        Args:
            ctx: context of the call, a ``click.Context``.
            formatter: where it is written, a ``click.HelpFormatter``.
        """
        with formatter.section("Commands"):
            formatter.write_dl([*COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that was typed, and import its module.

        Args:
            ctx: context of the call, a ``click.Context``.
            args: words after ``dpmac``, of which the first names the command.

        Returns:
            Its name, the command and the words after it. Name and command are None if completion
            asks about a name that there is not; otherwise click ends with a usage error.
        """
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(command.name or ""), rest


app = typer.Typer(
    name="dpmac",
    cls=Commands,
    help="Train models under differential privacy, and compute privacy guarantees.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    """Parse global options, before a command.

    Args:
        version: handled by its own callback, which prints the version and exits.
    """
    del version
