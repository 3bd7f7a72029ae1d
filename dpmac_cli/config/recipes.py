"""Recipes: the run of the paper, the best run for a budget, and files of settings by name."""

from collections.abc import Iterator, Mapping
from typing import Any

from dpmac_cli.config.best import best, reasons
from dpmac_cli.config.named import BEST, PAPER, RECIPES, file_of
from dpmac_cli.config.settings import Settings
from dpmac_cli.config.sources import SettingValue, combined
from dpmac_cli.config.yaml_file import read_settings
from dpmac_cli.data.registry import DATASETS, Dataset


def recipe_of(given: Settings) -> str:
    """Return PAPER or BEST.

    Noise that is given means the run of the paper, where the paper describes one.
    """
    if given.recipe is not None:
        return given.recipe
    described = given.dataset in DATASETS and given.backbone is None
    return PAPER if described and (given.sigma is not None or given.no_dp) else BEST


def of_recipe(given: Settings, facts: Dataset) -> dict[str, Any]:
    """Return the settings of the recipe, for those that are not given."""
    recipe = recipe_of(given)
    return {"recipe": recipe, **(best(given, facts) if recipe == BEST else {})}


def recipe_notes(given: Settings, facts: Dataset) -> Iterator[str]:
    """Yield what the recipe chose, and why."""
    if recipe_of(given) == BEST:
        yield from (f"recipe best: {part}." for part in reasons(given, facts))


def with_file(given: Mapping[str, SettingValue], errors: list[str]) -> Mapping[str, SettingValue]:
    """Return given settings and, below them, those of the file of a named recipe.

    Faults are added to ``errors``.
    """
    entry = given.get("recipe")
    if entry is None or entry.value not in RECIPES:
        return given
    name = str(entry.value)
    if RECIPES[name].command != "train":
        errors.append(f"{entry.origin} {name} has several runs. Use {RECIPES[name].line(name)}.")
        return given
    above = dict(given)
    del above["recipe"]
    return combined(read_settings(file_of(name), errors), above, errors)
