"""Recipes by rule: the run of the paper, and the best run for a budget."""

from collections.abc import Iterator
from typing import Any

from dpmac_cli.config.best import best, reasons
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.settings import Settings
from dpmac_cli.data.registry import DATASETS, Dataset


def recipe_of(given: Settings) -> str:
    """Return PAPER or BEST.

    Noise that is given means the run of the paper, where the paper describes one.
    """
    described = given.dataset in DATASETS and given.backbone is None
    noise = described and (given.sigma is not None or given.no_dp)
    return given.recipe or (PAPER if noise else BEST)


def of_recipe(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the settings of the recipe, for those that are not given."""
    recipe = recipe_of(given)
    return {"recipe": recipe, **(best(given, facts) if recipe == BEST else {})}


def recipe_notes(given: Settings, facts: Dataset) -> Iterator[str]:
    """Yield what the recipe chose, and why."""
    if recipe_of(given) == BEST:
        yield from (f"recipe best: {part}." for part in reasons(given, facts))
