"""Sources of settings: flags, YAML files and recipes by name. Flags take precedence."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from dpmac_cli.bounded_yaml import TextLoader, read_text
from dpmac_cli.config.flags import flag_name, is_given, valid
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.settings import EXCLUSIVE, OWN_MODEL, Settings
from dpmac_cli.errors import raise_errors

#: First words of a config.yaml written by dpmac.
HEADER = "# Settings of a dpmac run."
#: Texts in YAML that are no values of a flag, in lower case.
WORDS: Mapping[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
#: Values by the names of settings, as text or of their types; None and False if not given.
Values = Mapping[str, Any]


def read_yaml(file: Path, errors: list[str]) -> dict[str, Any]:
    """Return the values in a YAML file by the names of settings, and add its faults to ``errors``.

    A value is the text of a flag's value, true, false or None, or a list of such: YAML's number
    parsing (010 is 8, 1:30 is 90, 1e-5 is text) is not used.
    """
    try:
        loader = TextLoader(read_text(file))
        loader.name = str(file)  # for its messages
        root = loader.get_single_node()
        found = None if root is None else loader.construct_document(root)
    except OSError as failure:
        errors.append(f"--config: {file} cannot be read ({failure.strerror or failure}).")
        return {}
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as failure:
        why = " ".join(str(failure).split())
        errors.append(f"--config: {file} is not valid YAML: {why}. Write lines like 'sigma: 0.8'.")
        return {}
    if root is None or not isinstance(found, dict):
        if found:
            errors.append(f"--config: {file} must contain lines like 'sigma: 0.8'.")
        return {}
    values = {str(key).replace("-", "_"): _value(value) for key, value in found.items()}
    given = Counter(str(key.value).replace("-", "_") for key, _ in root.value)
    errors += [
        f"{file}: --{flag_name(name)} is given {count} times. Give it once."
        for name, count in given.items()
        if count > 1
    ]
    errors += [
        f"{file}: the list of --{flag_name(name)} is empty."
        for name, value in values.items()
        if value == []
    ]
    return values


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_value, value)]
    return WORDS.get(value.lower(), value) if isinstance(value, str) else value


def to_yaml(recorded: Values) -> str:
    """Return a file that repeats a run exactly, with --config and the same --seed."""
    body = yaml.safe_dump(by_flag(recorded), sort_keys=False)
    return f"{HEADER} Repeat it with dpmac train --config FILE; a seed is not saved.\n{body}"


def by_flag(settings: Values) -> dict[str, Any]:
    """Return settings by the names of their flags, as files have them."""
    return {flag_name(name): value for name, value in settings.items()}


def by_setting(recorded: Values) -> dict[str, Any]:
    """Return the settings of a file, which has them by the names of their flags."""
    return {name.replace("-", "_"): value for name, value in recorded.items()}


def given_settings(flags: Values, below: Path | Values | None = None) -> Settings:
    """Return the settings of flags and, below them, of a file and of the recipe of a name.

    Args:
        flags: values by name.
        below: a YAML file, or values that were recorded.

    Raises:
        InputError: lists every fault of a value, an unknown name or a contradiction.
    """
    errors: list[str] = []
    above = valid(Settings, flags, errors).explicit
    if isinstance(below, Path):
        file, below = below, in_file(below, errors)
        if "model" in below and not is_given(flags.get("model")):
            errors += faults_of_model([below["model"]], file)
    values = over(above, below or {})
    if (recipe := RECIPES.get(name := values.get("recipe", ""))) is not None:
        del values["recipe"]
        if recipe.command != "train":
            errors.append(f"--recipe {name} has several runs. Use {recipe.line(name)}.")
        values = over(values, in_file(file_of(name), errors))
    raise_errors(errors)
    return Settings.model_validate(values)


def in_file(file: Path, errors: list[str]) -> Values:
    """Return the settings of a YAML file, and add its faults to ``errors``."""
    return valid(Settings, read_yaml(file, errors), errors, f"{file}: ").explicit


def over(above: Values, below: Values) -> dict[str, Any]:
    """Merge settings, where those ``above`` take precedence, also over what they exclude."""
    replaced = {name for group in EXCLUSIVE if not above.keys().isdisjoint(group) for name in group}
    return {name: value for name, value in below.items() if name not in replaced} | dict(above)


def parse_settings(flags: Settings | Values) -> dict[str, Any]:
    """Convert given flags to values and validate them. Raises InputError with every fault found."""
    settings = flags if isinstance(flags, Settings) else Settings.model_validate(flags)
    return dict(settings.explicit)


def faults_of_model(models: Iterable[str], file: Path) -> Iterator[str]:
    """Reject models in a settings file that refer to code: only flags may do that."""
    for model in filter(OWN_MODEL[0], models):
        yield (
            f"{file}: --model {model} is code, which dpmac does not run from a settings file. If "
            f"you trust it, add --model {model} to the command line."
        )
