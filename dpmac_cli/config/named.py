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
    """A settings file of the package, and what it reaches."""

    about: str  # one line
    command: str = "train"  # subcommand that runs it: train, compare or tune
    with_flags: str = ""  # flags that it needs
    epsilon: str = ""  # privacy cost of a run; "" if the file leaves it open
    accuracy: str = ""  # test accuracy in percent; "" if it was not measured
    minutes: str = ""  # on two cores; "" if it was not measured
    extra: str = ""  # extra of the package that it needs

    def line(self, name: str) -> str:
        """Return the command that runs this recipe."""
        return " ".join(filter(None, ("dpmac", self.command, "--recipe", name, self.with_flags)))


RECIPES: Mapping[str, NamedRecipe] = table(NamedRecipe, HERE / "named.toml")


def file_of(name: str) -> Path:
    """Return the settings file of a named recipe."""
    return HERE / "named" / f"{name}.yaml"
