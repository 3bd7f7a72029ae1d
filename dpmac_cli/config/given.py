"""Given settings with their origins: validation of each, and of contradictions."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError

from dpmac_cli.config.settings import NUMBER, OWN_MODEL, SETTINGS, Setting, flag_name
from dpmac_cli.data.schema import AtHand
from dpmac_cli.errors import raise_errors

#: Mutually exclusive settings for the same thing. A flag replaces a file's setting.
EXCLUSIVE = (("sigma", "epsilon", "no_dp"), ("max_epsilon", "no_dp"), ("epochs", "steps"))
#: Settings that contradict each other, and why. Neither replaces the other: a run that a file makes
#: secure must not become insecure unnoticed.
INCOMPATIBLE = {
    (name, other): why for name, of in SETTINGS.items() for other, why in of.not_with.items()
}
#: Names of settings in torch, Opacus and TensorFlow Privacy, and other common names. A comparison
#: has several optimizers and seeds, a run has one of each.
OTHER_NAMES = {other: flag_name(name) for name, of in SETTINGS.items() for other in of.also}
OTHER_NAMES |= {"optimizer": "optimizers", "seed": "seeds"}
#: Parsers of numbers.
NUMBERS: Mapping[type, TypeAdapter[Any]] = {int: TypeAdapter(int), float: TypeAdapter(FiniteFloat)}
#: Why Apple's GPUs are rejected.
NO_MPS = " It has no float64, which clipping needs if float32 would round gradients too much."
#: Remedy for a value of another type.
AS_DATASET = (
    " Use text or numbers, and for dataset a name, a path, or records in memory: ArrayData(x, y), "
    "from_torch(dataset) or from_dataframe(frame, schema)."
)


@dataclass(frozen=True)
class Given:
    """A given value and its origin: "--sigma", or "sigma in FILE"."""

    value: Any
    origin: str


def typed(flags: Mapping[str, Any], errors: list[str]) -> dict[str, Given]:
    """Return the given flags; unknown settings and invalid types are added to ``errors``."""
    given: dict[str, Given] = {}
    for name, value in flags.items():
        kinds = (str, Real, Path, AtHand) if name == "dataset" else (str, Real, Path)
        if name not in SETTINGS:
            errors.append(f"There is no setting '{name}'.{near_setting(name, SETTINGS)}")
        elif value is None or value is False:
            continue
        elif isinstance(value, kinds):
            given[name] = Given(value, f"--{flag_name(name)}")
        else:
            known = SETTINGS[name].choices and f" Known: {SETTINGS[name].known}."
            errors.append(f"{name} cannot be a {type(value).__name__}.{known or AS_DATASET}")
    return given


def combined(
    file: Mapping[str, Given], flags: Mapping[str, Given], errors: list[str]
) -> dict[str, Given]:
    """Merge settings, where flags take precedence; add contradictions to ``errors``."""
    below = dict(file)
    for group in EXCLUSIVE:
        for source in (flags, below):
            origins = [source[name].origin for name in group if name in source]
            if len(origins) > 1:
                errors.append(f"{' and '.join(origins)} contradict each other: give one.")
        if any(name in flags for name in group):
            below = {name: entry for name, entry in below.items() if name not in group}
    given = below | dict(flags)
    for pair, why in INCOMPATIBLE.items():
        origins = [given[name].origin for name in pair if name in given]
        if len(origins) == len(pair):
            errors.append(f"{' and '.join(origins)} contradict each other: {why}. Give one.")
    return given


def validated(
    given: Mapping[str, Given], errors: list[str], known: Mapping[str, Setting] = SETTINGS
) -> dict[str, Any]:
    """Return the valid settings, and add the faults of the others to ``errors``."""
    values: dict[str, Any] = {}
    for name, entry in given.items():
        setting, value = known[name], entry.value
        if isinstance(value, AtHand):
            values[name] = value
            continue
        parts, found = str(value).split(",") if setting.several else [value], []
        for part in parts:
            try:
                found.append(_parsed(name, setting, part, entry.origin))
            except ValueError as fault:
                if str(fault) not in errors:
                    errors.append(str(fault))
        if len(found) == len(parts):
            values[name] = tuple(found) if setting.several else found[0]
    return values


def parse(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Convert given flags to values and validate each of them separately.

    Raises InputError with every fault found.
    """
    errors: list[str] = []
    values = validated(typed(flags, errors), errors)
    raise_errors(errors)
    return values


def _parsed(name: str, setting: Setting, value: Any, origin: str) -> Any:
    """Return a value as its type. Raises ValueError, a sentence with the fault and its remedy."""
    if setting.kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{origin} must be true or false.")
    text = setting.renamed.get(str(value), str(value))
    own = setting.besides is not None and setting.besides[0](text)
    if setting.choices and text not in setting.choices and not own:
        raise ValueError(
            f"{origin}: there is no {flag_name(name)} '{text}'.{near(text, setting.choices)} "
            f"Known: {setting.known}."
        )
    if setting.pattern and not re.fullmatch(setting.pattern[0], text):
        hint = NO_MPS if name == "device" and text.startswith("mps") else ""
        raise ValueError(f"{origin} must be {setting.pattern[1]}, not '{text}'.{hint}")
    if setting.kind is Path and not text:
        raise ValueError(f"{origin} must not be empty. Set it to a folder, or leave it out.")
    if setting.kind not in NUMBERS:
        return setting.kind(text)
    try:
        number = NUMBERS[setting.kind].validate_python(text)
    except ValidationError:
        pointed = text.replace(",", ".")  # decimal comma
        meant = pointed != text and re.fullmatch(NUMBER, pointed)
        hint = f" Did you mean {pointed}?" if meant else ""
        kind = "a whole number" if setting.kind is int else "a number"
        raise ValueError(f"{origin}: '{text}' is not {kind}.{hint}") from None
    if not setting.allows(number):
        hint = " To train without privacy use --no-dp." if name == "sigma" and not number else ""
        raise ValueError(f"{origin} must be {setting.bounds}, not {text}.{hint}")
    return number


def faults_of_model(models: Iterable[str], origin: str) -> Iterator[str]:
    """Reject models in a settings file that refer to code: only flags may do that."""
    for model in filter(OWN_MODEL[0], models):
        yield (
            f"{origin} refers to code, {model}, which dpmac does not run from a settings file. If "
            f"you trust it, add --model {model} to the command line."
        )


def near_setting(written: str, known: Collection[str]) -> str:
    """Return a hint for an unknown setting; ``known`` are field names of settings."""
    ours = OTHER_NAMES.get(written.replace("_", "-"), "")
    if ours.replace("-", "_") in known:
        return f" In dpmac it is called {ours}."
    return near(written, map(flag_name, known))


def near(text: str, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" with close matches, or an empty string."""
    matches = difflib.get_close_matches(text.lower(), list(names), n=2, cutoff=0.6)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""
