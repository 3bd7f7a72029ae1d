"""Named recipes: settings files that are part of the package, and what each of them reaches.

To add a recipe, add a file to named/ and an entry to named.toml.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpmac_cli.files import table

HERE = Path(__file__).parent
#: Recipes without a file: the run of the paper, and the best run for a budget.
PAPER, BEST = "paper", "best"


@dataclass(frozen=True, kw_only=True)
class NamedRecipe:
    """A settings file of the package, and what it reaches: a row of named.toml.

    Attributes:
        about: one line.
        command: subcommand that runs it: train, compare or tune.
        with_flags: flags that it needs.
        epsilon: privacy cost of a run; "" if the file leaves it open.
        accuracy: test accuracy in percent; "" if it was not measured.
        minutes: time on two cores; "" if it was not measured.
        extra: extra of the package that it needs.
    """

    about: str
    command: str = "train"
    with_flags: str = ""
    epsilon: str = ""
    accuracy: str = ""
    minutes: str = ""
    extra: str = ""

    def line(self, name: str) -> str:
        """Return the command that runs this recipe, which has this name."""
        command = ("dpmac", self.command, "--recipe", name, self.with_flags)
        return " ".join(command).rstrip()


#: Recipes without a file: what each of them is, and a command that runs it.
RULES = {
    BEST: ("the best run for an epsilon, by rule", "dpmac train --dataset NAME --epsilon 3"),
    PAPER: ("the run of the paper at a noise multiplier", "dpmac train --dataset NAME --sigma 0.8"),
}
#: Facts of a recipe that a table of recipes shows.
SHOWN = ("name", "accuracy", "epsilon", "minutes", "extra")
RECIPES: Mapping[str, NamedRecipe] = table(NamedRecipe, HERE / "named.toml")


def recipe_rows() -> list[dict[str, str]]:
    """Return what is known of each recipe, with its name and the command that runs it.

    A row of a rule, which has no file, has no other columns than these and ``about``.
    """
    rows = list[dict[str, str]]()
    for name, (about, command) in RULES.items():
        rows.append({"name": name, "about": about, "command": command})
    for name, recipe in RECIPES.items():
        rows.append({**vars(recipe), "name": name, "command": recipe.line(name)})
    return rows


def file_of(name: str) -> Path:
    """Return the path of the settings file of a named recipe, which is part of the package."""
    return HERE / "named" / f"{name}.yaml"
