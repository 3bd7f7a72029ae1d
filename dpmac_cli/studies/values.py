"""Settings with several values each, from flags, YAML files and recipes. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpmac_cli.config.fields import Option
from dpmac_cli.config.flags import unknown
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.settings import SETTINGS
from dpmac_cli.config.sources import (
    EXCLUSIVE,
    faults_of_model,
    is_given,
    is_setting,
    parse_settings,
)
from dpmac_cli.config.yaml_file import read_lists
from dpmac_cli.errors import InputError

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
    given = {} if file is None else _read(file, known, errors)
    errors += [unknown(name, known) for name in flags if name not in known]
    typed = {
        name: listed_values(value, known[name])
        for name, value in flags.items()
        if is_given(value) and name in known
    }
    if "model" not in typed:
        errors += faults_of_model(given.get("model", ()), f"model in {file}")
    given = _over(given, typed)
    if (recipe := given.get("recipe", [""])[0]) in RECIPES:
        del given["recipe"]
        given = _over(_read(file_of(recipe), known, errors), given)
    return given


def listed_values(value: Any, option: Option) -> list[Any]:
    """Return the values in a comma-separated text, in a list, or of a single value."""
    if isinstance(value, list | tuple):
        return [part for item in value for part in listed_values(item, option)]
    if not isinstance(value, str | int | float | Path):  # records in memory
        return [value]
    text = str(value)
    return [text] if option.flag.comma else [part.strip() for part in text.split(",")]


def typed_value(name: str, value: Any) -> Any:
    """Return a value as in flags and YAML: bool for a switch."""
    switches = {"true": True, "false": False}
    return switches.get(str(value).lower(), value) if SETTINGS[name].switch else value


def faults_of_values(given: Mapping[str, Sequence[Any]]) -> Iterator[str]:
    """Yield the faults of single values of settings of a run."""
    for name, values in given.items():
        for value in values if is_setting(name) else ():
            try:
                parse_settings({name: typed_value(name, value)})
            except InputError as failure:
                yield from failure.errors


def _read(file: Path, known: Mapping[str, Option], errors: list[str]) -> ValuesOf:
    found = read_lists(file, known, errors)
    return {name: listed_values(values, known[name]) for name, values in found.items()}


def _over(below: ValuesOf, above: ValuesOf) -> ValuesOf:
    """Merge settings, where those ``above`` take precedence, also over what they exclude."""
    replaced = {name for group in EXCLUSIVE if not above.keys().isdisjoint(group) for name in group}
    return {name: values for name, values in below.items() if name not in replaced} | above
