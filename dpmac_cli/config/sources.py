"""Sources of settings: flags, YAML files and recipes by name. Flags take precedence.

A file may come from somebody else, so it cannot name code to run, and its values are text until a
setting validates them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dpmac_cli.bounded_yaml import TextLoader, read_text
from dpmac_cli.config.flags import flag_name, is_given, setting_name
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.settings import NOT_BOTH, Settings
from dpmac_cli.errors import InputError, raise_errors

#: First words of a config.yaml written by dpmac.
HEADER = "# Settings of a dpmac run."
#: Texts in YAML that are no values of a flag, in lower case.
WORDS: Mapping[str, bool | None] = {
    "": None,
    "~": None,
    "null": None,
    "true": True,
    "false": False,
}
#: What a file should contain.
LINES = "Write lines like 'sigma: 0.8'."
#: Values by the names of settings, as text or of their types; None and False if not given.
Values = Mapping[str, Any]
#: Values by the names of settings, and where those of a file are: "run.yaml, line 3".
Layers = tuple[dict[str, Any], dict[str, str]]


def read_yaml(file: Path) -> Layers:
    """Return what is written in a YAML file, and where.

    A value is the text of a flag's value, true, false or None, or a list of such: YAML's number
    parsing (010 is 8, 1:30 is 90, 1e-5 is text) is not used.

    Args:
        file: path of the file, of a bounded size.

    Returns:
        Values by the names of settings, and the place of each, such as "run.yaml, line 3". Neither
        names nor values are validated.

    Raises:
        InputError: it cannot be read, is no mapping, or has a key twice.
    """
    try:
        loader = TextLoader(read_text(file))
        loader.name = str(file)  # for its messages
        root = loader.get_single_node()
        mapping = {} if root is None else loader.construct_document(root) or {}
    except OSError as failure:
        why = failure.strerror or failure
        raise InputError(f"{{config=}}{file} cannot be read ({why}).") from failure
    except UnicodeDecodeError as failure:
        raise InputError(f"{{config=}}{file} is not in UTF-8. Save it as UTF-8.") from failure
    except (yaml.YAMLError, RecursionError) as failure:
        why = " ".join(str(failure).split())
        raise InputError(f"{{config=}}{file} is not valid YAML: {why}. {LINES}") from failure
    if not isinstance(mapping, dict):
        raise InputError(f"{{config=}}{file} is not a mapping. {LINES}")
    places, errors = dict[str, str](), list[str]()
    entries = root.value if mapping else ()
    for key, value in entries:
        name = setting_name(key.value)
        place = f"{file}, line {key.start_mark.line + 1}"
        if name in places:
            errors.append(f"{place}: {key.value} is given twice. Give it once.")
        if value.value == []:
            errors.append(f"{place}: {key.value} is empty.")
        places[name] = place
    raise_errors(errors)
    values = {setting_name(key): _value(value) for key, value in mapping.items()}
    return values, places


def _value(value: Any) -> Any:
    """Return a value of a file, with :data:`WORDS` such as true as what they mean."""
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, str):
        return WORDS.get(value.lower(), value)
    return value


def to_yaml(recorded: Values) -> str:
    """Return a file that repeats a run exactly, with --config and the same --seed.

    Args:
        recorded: settings that describe the run, see :attr:`.Plan.recorded`.
    """
    body = yaml.safe_dump(by_flag(recorded), sort_keys=False)
    return f"{HEADER} Repeat it with dpmac train --config FILE; a seed is not saved.\n{body}"


def by_flag(settings: Values) -> dict[str, Any]:
    """Return settings by the names of their flags, as files have them.

    Args:
        settings: values by the names of settings.
    """
    return {flag_name(name): value for name, value in settings.items()}


def by_setting(recorded: Values) -> dict[str, Any]:
    """Return the settings of a file, which has them by the names of their flags.

    Args:
        recorded: values of a file that dpmac wrote; see :func:`by_flag`.
    """
    return {setting_name(flag): value for flag, value in recorded.items()}


def layered(
    flags: Values, below: Path | Values | None = None, *, several_runs: bool = False
) -> Layers:
    """Return flags and, below them, the values of a file and of the recipe that these name.

    Values are not validated. Those that are not given are left out.

    Args:
        flags: values by name.
        below: a YAML file, or values that were recorded.
        several_runs: whether the recipe may be of several runs.

    Returns:
        Values by name, and the places of those that are from the file.

    Raises:
        InputError: the file cannot be read or refers to code, or the recipe is of several runs.
    """
    above = _given(flags)
    if isinstance(below, Path):
        written, places = read_yaml(below)
    else:
        written, places = dict(below or {}), {}
    if "model" not in above:
        _refuse_code(written, places)
    values = over(above, _given(written))
    name = str(values.get("recipe"))
    recipe = RECIPES.get(name)
    if recipe is not None:
        if recipe.command != "train" and not several_runs:
            raise InputError(f"{{recipe=}}{name} has several runs. Use {recipe.line(name)}.")
        del values["recipe"]
        of_recipe, _ = read_yaml(file_of(name))
        values = over(values, of_recipe)
    for setting in above:
        places.pop(setting, None)
    return values, places


def _given(values: Values) -> dict[str, Any]:
    """Return the values that are given: all but None and False."""
    return {name: value for name, value in values.items() if is_given(value)}


def _refuse_code(written: Values, places: Mapping[str, str]) -> None:
    """Reject a model in a file that refers to code: only flags may do that. Raises InputError."""
    model = written.get("model")
    if "model" in places and ":" in str(model):
        raise InputError(
            f"{places['model']}: model {model} is code, which dpmac does not run from a "
            f"settings file. If you trust it, add {{model=}}{model} to the command line."
        )


def given_settings(flags: Values, below: Path | Values | None = None) -> Settings:
    """Return the validated settings of :func:`layered` flags, file and recipe.

    Example:
        >>> settings = given_settings({"sigma": "0.8", "epochs": 3})
        >>> settings.sigma, settings.epochs, settings.explicit.keys() >= {"sigma", "epochs"}
        (0.8, 3, True)

    Args:
        flags: values by name, as text or of their types.
        below: see :func:`layered`.

    Returns:
        The settings; :attr:`.Settings.explicit` has those that were given. Defaults that depend on
        the dataset are not filled in: see :func:`~dpmac_cli.config.planning.plan`.

    Raises:
        InputError: lists every fault of a value, an unknown name or a contradiction.
    """
    values, places = layered(flags, below)
    return Settings.model_validate(values, context=places)


def over(above: Values, below: Values) -> dict[str, Any]:
    """Merge settings, where those ``above`` take precedence, also over ways to say the same.

    Example:
        >>> over({"epsilon": 3}, {"sigma": 0.8, "lr": 0.1})
        {'lr': 0.1, 'epsilon': 3}

    Args:
        above: values by name.
        below: values by name, without those that ``above`` says in another way: see
            :data:`.NOT_BOTH`.
    """
    remaining = dict(below)
    for group, why in NOT_BOTH.items():
        ways_to_say_the_same = not why
        if ways_to_say_the_same and not above.keys().isdisjoint(group):
            for name in group:
                remaining.pop(name, None)
    return remaining | dict(above)


def values_of(settings: Settings | Values | None) -> Values:
    """Return the values that a program set, by name.

    Args:
        settings: settings, values by name, or None.

    Raises:
        InputError: it is another object.
    """
    if isinstance(settings, Settings):
        return settings.explicit
    if settings is None or isinstance(settings, Mapping):
        return settings or {}
    raise InputError(
        f"Settings cannot be a {type(settings).__name__}. Give them as keywords, such as "
        'dataset="digits", epsilon=3, or as Settings(...).'
    )
