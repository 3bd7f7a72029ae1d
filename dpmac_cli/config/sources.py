"""Sources of settings: flags and files are merged, with origins, and contradictions reported."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dpmac_cli.config.fields import flag_name
from dpmac_cli.config.flags import unknown, valid_part
from dpmac_cli.config.settings import OWN_MODEL, SETTINGS, Settings
from dpmac_cli.errors import InputError

#: Mutually exclusive settings for the same thing. A flag replaces a file's setting.
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("sigma", "epsilon", "no_dp"),
    ("max_epsilon", "no_dp"),
    ("epochs", "steps"),
)
#: Settings that contradict each other, and why. Neither replaces the other: a run that a file makes
#: secure must not become insecure unnoticed.
INCOMPATIBLE: Mapping[tuple[str, str], str] = {
    (name, other): why for name, of in SETTINGS.items() for other, why in of.flag.not_with.items()
}
#: Values by the names of settings, as text or of their types.
Values = Mapping[str, Any] | Mapping[str, Any]


@dataclass(frozen=True)
class SettingValue:
    """A given value and its origin: "--sigma", or "sigma in FILE"."""

    value: Any
    origin: str


def is_setting(name: str) -> bool:
    """Return whether there is a setting of this name."""
    return name in SETTINGS


def is_given(value: object) -> bool:
    """Return whether a flag or a keyword has a value. 0 is one, which equals False."""
    return value is not None and value is not False


def by_flag(settings: Mapping[str, Any]) -> dict[str, Any]:
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


def from_flags(flags: Mapping[Any, object], errors: list[str]) -> dict[str, SettingValue]:
    """Return the given flags; unknown settings are added to ``errors``."""
    given: dict[str, SettingValue] = {}
    for name, value in flags.items():
        if not is_setting(name):
            errors.append(unknown(name, SETTINGS))
        elif is_given(value):
            given[name] = SettingValue(value, f"--{flag_name(name)}")
    return given


def combined(
    file: Mapping[str, SettingValue],
    flags: Mapping[str, SettingValue],
    errors: list[str],
) -> dict[str, SettingValue]:
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
    given: Mapping[str, SettingValue], errors: list[str]
) -> tuple[Settings, frozenset[str]]:
    """Return the valid settings, and the names of the others; add their faults to ``errors``."""
    values = {name: entry.value for name, entry in given.items()}
    origins = {name: entry.origin for name, entry in given.items()}
    settings, invalid = valid_part(Settings, values, errors, origins)
    return settings, frozenset(name for name in given if name in invalid)


def parse_settings(flags: Settings | Mapping[Any, Any]) -> dict[str, Any]:
    """Convert given flags to values and validate each of them separately.

    Raises InputError with every fault found.
    """
    settings = flags if isinstance(flags, Settings) else Settings.model_validate(flags)
    return {name: value for name, value in settings.explicit.items() if is_setting(name)}


def faults_of_model(models: Iterable[str], origin: str) -> Iterator[str]:
    """Reject models in a settings file that refer to code: only flags may do that."""
    for model in filter(OWN_MODEL[0], models):
        yield (
            f"{origin} refers to code, {model}, which dpmac does not run from a settings file. If "
            f"you trust it, add --model {model} to the command line."
        )
