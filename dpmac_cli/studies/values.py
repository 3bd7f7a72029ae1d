"""Settings with several values each, from flags, YAML files and recipes. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpmac_cli.config.fields import Option
from dpmac_cli.config.flags import is_given, unknown
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.sources import faults_of_model, is_setting, over, parse_settings
from dpmac_cli.config.yaml_file import read_yaml
from dpmac_cli.errors import InputError

#: Settings whose values may have commas.
WITH_COMMAS = ("classes", "feature_range", "unit", "class_weights")
#: ValuesOf of each setting, by its name.
ValuesOf = dict[str, list[Any]]


def read_values(
    flags: Mapping[str, Any], file: Path | None, known: Mapping[str, Option], errors: list[str]
) -> ValuesOf:
    """Return the values of each setting. Flags take precedence over a file, and it over a recipe.

    Args:
        flags: field name -> comma-separated text, a list of values, or None.
        file: YAML file with flag names as keys, and values or lists of values.
        known: allowed settings.
        errors: faults are added to these.
    """
    typed = _listed(flags, known, errors)
    given = {} if file is None else _listed(read_yaml(file, errors), known, errors, f"{file}: ")
    if file is not None and "model" not in typed:
        errors += faults_of_model(given.get("model", ()), file)
    given = over(typed, given)
    if (recipe := given.get("recipe", [""])[0]) in RECIPES:
        del given["recipe"]
        given = over(given, _listed(read_yaml(file_of(recipe), errors), known, errors))
    return given


def listed_values(value: Any, option: Option) -> list[Any]:
    """Return the values in a comma-separated text, in a list, or of a single value."""
    if isinstance(value, list | tuple):
        return [part for item in value for part in listed_values(item, option)]
    if isinstance(value, bool) or not isinstance(value, str | int | float | Path):
        return [value]  # of a switch, or records in memory
    text = str(value)
    return [text] if option.name in WITH_COMMAS else [part.strip() for part in text.split(",")]


def faults_of_values(given: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield the faults of single values of settings of a run."""
    for name, values in given.items():
        for value in values if is_setting(name) else ():
            try:
                parse_settings({name: value})
            except InputError as failure:
                yield from failure.errors


def _listed(
    values: Mapping[str, Any], known: Mapping[str, Option], errors: list[str], origin: str = ""
) -> ValuesOf:
    """Return lists of values by name, without those that are not given."""
    errors += [f"{origin}{unknown(name, known)}" for name in values if name not in known]
    return {
        name: listed_values(value, known[name])
        for name, value in values.items()
        if is_given(value) and name in known
    }
