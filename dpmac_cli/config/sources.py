"""Sources of settings: flags, files and recipes by name. Flags take precedence."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.flags import is_given, valid
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.settings import EXCLUSIVE, OWN_MODEL, SETTINGS, Settings
from dpmac_cli.config.yaml_file import read_yaml
from dpmac_cli.errors import InputError, raise_errors

#: Values by the names of settings, as text or of their types; None and False if not given.
Values = Mapping[str, Any]


def is_setting(name: str) -> bool:
    """Return whether there is a setting of this name."""
    return name in SETTINGS


def by_flag(settings: Values) -> dict[str, Any]:
    """Return settings by the names of their flags, as files have them."""
    return {flag_name(name): value for name, value in settings.items()}


def by_setting(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file, which has them by the names of their flags.

    Raises:
        InputError: a setting of another version is not known.
    """
    names = {name: name.replace("-", "_") for name in recorded}
    gone = [
        f"{flag} in the checkpoint"
        for flag, name in names.items()
        if not is_setting(name) and recorded[flag] is not False
    ]
    if gone:
        raise InputError(
            f"{' and '.join(gone)}: this version of dpmac has no such setting. Resume with the "
            "version that started the run, or start a new run."
        )
    return {name: recorded[flag] for flag, name in names.items() if is_setting(name)}


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
