"""dpmac recipes: the recipes by name, what each reaches, and the command that runs it."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpmac_cli.cli import console
from dpmac_cli.cli.options import JsonFlags, take, with_options
from dpmac_cli.config.fields import options
from dpmac_cli.config.named import BEST, PAPER, RECIPES, NamedRecipe
from dpmac_cli.storage.files import to_json

#: Recipes without a file, with the command that runs each.
RULES = {
    BEST: ("the best run for an epsilon, by rule", "dpmac train --dataset NAME --epsilon 3"),
    PAPER: ("the run of the paper at a noise multiplier", "dpmac train --dataset NAME --sigma 0.8"),
}


@with_options(options(JsonFlags))
def recipes(**given: Any) -> None:
    """List recipes: what each reaches, its epsilon, its time, and the command that runs it.

    --epsilon means the recipe best: the best run for this budget, by one rule. --sigma means the
    recipe paper: the run that the paper describes. The others are files of settings by name.

    Example: dpmac recipes

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage.
    """
    flags = take(JsonFlags, given)
    if flags.json:
        console.print_result(to_json({"recipes": [*_values()]}))
        return
    print_recipes(console.stdout())


def print_recipes(out: Console) -> None:
    """Print the recipes, and below them the commands, each in one line."""
    console.widen(out)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("recipe", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "extra" else "right", no_wrap=True)
    for row in _values():
        table.add_row(Text(row["name"], style="bold"), *(row.get(name, "") for name in COLUMNS))
    out.print(table)
    out.print(Text("\nto run one of them:", style="bold"))
    out.print(*(Text(row["command"]) for row in _values()), sep="\n", soft_wrap=True)
    out.print(
        Text("accuracy: test accuracy in percent. minutes: of the whole command, on two cores.")
    )


def _values() -> Iterator[dict[str, str]]:
    """Yield the recipes as JSON values."""
    for name, (about, command) in RULES.items():
        yield {"name": name, "about": about, "command": command}
    for name, recipe in RECIPES.items():
        yield {"name": name, **_cells(recipe), "about": recipe.about, "command": recipe.line(name)}


def _cells(recipe: NamedRecipe) -> dict[str, str]:
    """Return the values of the columns between name and command."""
    return {column: getattr(recipe, column) for column in COLUMNS}


#: Columns of numbers, and the extra of the package that a recipe needs.
COLUMNS = ("accuracy", "epsilon", "minutes", "extra")
