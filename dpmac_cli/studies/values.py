"""Settings with several values each, from flags, YAML files and recipes. Imports no torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpmac_cli.config.flags import Model, Option, is_given, options, unknown, valid
from dpmac_cli.config.named import RECIPES, file_of
from dpmac_cli.config.plan import DataPlan
from dpmac_cli.config.resolve import Resolved, resolve
from dpmac_cli.config.settings import SETTINGS, Settings
from dpmac_cli.config.sources import faults_of_model, over, read_yaml
from dpmac_cli.errors import InputError, raise_errors

#: Settings whose values may have commas.
WITH_COMMAS = ("classes", "feature_range", "unit", "class_weights")
#: Most combinations of values, each of which is validated before anything is trained.
MOST = 10_000
#: Values of each setting, by its name.
ValuesOf = dict[str, list[Any]]


def read_values(
    model: type[Model], flags: Mapping[str, Any], file: Path | None, errors: list[str]
) -> tuple[Model, ValuesOf]:
    """Return the settings of a study itself, and the values of each setting of its runs.

    Flags take precedence over a file, and it over a recipe.

    Args:
        model: settings of the study itself.
        flags: field name -> comma-separated text, a list of values, or None.
        file: YAML file with flag names as keys, and values or lists of values.
        errors: faults are added to these.
    """
    known = {**SETTINGS, **options(model)}
    typed = _listed(flags, known, errors)
    given = {} if file is None else _listed(read_yaml(file, errors), known, errors, f"{file}: ")
    if file is not None and "model" not in typed:
        errors += faults_of_model(given.get("model", ()), file)
    given = over(typed, given)
    if (recipe := given.get("recipe", [""])[0]) in RECIPES:
        del given["recipe"]
        given = over(given, _listed(read_yaml(file_of(recipe), errors), known, errors))
    own = {n: given.pop(n) for n in options(model) if n in given}
    several = options(model)
    own = {n: of if several[n].several else of[0] for n, of in own.items()}
    return valid(model, own, errors), given


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
    for name, value in ((name, value) for name, values in given.items() for value in values):
        errors = list[str]()
        valid(Settings, {name: value}, errors)
        yield from errors


def resolved(
    cases: Iterable[Mapping[str, Any]], data: DataPlan | None = None, *, same_data: bool = False
) -> tuple[list[Resolved], tuple[str, ...]]:
    """Resolve combinations of values; return their plans, and notes that concern all of them.

    With ``same_data``, the dataset is read once. Raises InputError with every fault of any.
    """
    found, errors, notes = list[Resolved](), dict[str, None](), dict[str, None]()
    for case in cases:
        try:
            one = resolve(case, data=data)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
            continue
        found.append(one)
        data = one.plan.data if same_data else None
        said = (*one.chosen, *one.notes)
        notes |= dict.fromkeys(note for note in said if "no effect" not in note)
    raise_errors(errors)
    return found, tuple(notes)


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
