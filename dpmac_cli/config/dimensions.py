"""Settings that a search draws: how they are written, what is refused, and random values.

Every value is validated before anything is trained, and so is every combination of values. Imports
no torch.
"""

import itertools
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpmac_cli.config.best import EPSILON
from dpmac_cli.config.fields import NUMBER, Option, flag_name
from dpmac_cli.config.flags import near_setting
from dpmac_cli.config.plan import DataPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_file import SearchFile
from dpmac_cli.config.settings import OPTIMIZER, RECIPE, SETTINGS, TASK
from dpmac_cli.config.sources import (
    EXCLUSIVE,
    SettingValue,
    faults_of_model,
    from_flags,
    is_given,
    is_setting,
    validated,
)
from dpmac_cli.errors import InputError, raise_errors

#: Settings that a search can draw.
SEARCHED: Mapping[str, Option] = {
    name: option
    for name, option in SETTINGS.items()
    if option.flag.group in (TASK, OPTIMIZER, RECIPE)
    and name not in ("dataset", "recipe", "class_weights")
    and not option.switch
}
#: Settings that a search decides itself, and why.
DECIDED: Mapping[str, str] = {
    "sigma": "the noise is calibrated for the --epsilon of the whole search",
    "max_epsilon": "the noise is calibrated for the --epsilon of the whole search",
    "no_dp": "without privacy any search is free: use dpmac compare",
    "seed": "whoever knows the seed knows how many trials there were",
    "canaries": "an audit tests one run: use dpmac train --canaries",
    "guesses": "an audit tests one run: use dpmac train --canaries",
    "score_every": "only the last score of a trial decides",
    "tuned_on": "the report says what the settings were chosen on",
    "force": "a search is only replaced by hand: delete its folder",
}
#: Most combinations to validate, and most values of a range of whole numbers.
COMBINATIONS, VALUES = 2_000, 500
#: Significant digits of a number that is drawn from a range.
DIGITS = 3
#: A trial's settings as text, by name.
Setting = Mapping[str, str]
_RANGE = re.compile(rf"(?P<low>{NUMBER})\.\.(?P<high>{NUMBER})(?P<log>:log)?")


@dataclass(frozen=True)
class Dimension:
    """A setting to draw, and its values.

    Attributes:
        values: all values, equally likely; for a range of numbers its two ends.
        low, high: ends of a range of numbers; None for a list of values.
        log: whether the logarithm of a number is uniform.
        origin: where it is given, in messages.
    """

    name: str
    values: tuple[str, ...]
    low: float | None
    high: float | None
    log: bool
    origin: str = "--search"

    @property
    def text(self) -> str:
        """Return it as the text of a flag, whatever its origin."""
        values = ",".join(self.values)
        if self.low is not None and self.high is not None:
            values = f"{self.values[0]}..{self.values[-1]}{':log' * self.log}"
        return f"{flag_name(self.name)}={values}"

    def draw(self, source: random.Random) -> str:
        """Return a random value, independent of all others."""
        if self.low is None or self.high is None:
            return source.choice(self.values)
        ends = (self.low, self.high)
        if SETTINGS[self.name].kind is int:
            ends = (self.low - 0.5, self.high + 0.5)
        low, high = map(math.log, ends) if self.log else ends
        found = source.uniform(low, high)
        number = math.exp(found) if self.log else found
        if SETTINGS[self.name].kind is int:
            return str(min(max(round(number), int(self.low)), int(self.high)))
        return f"{min(max(float(f'{number:.{DIGITS}g}'), self.low), self.high):.15g}"


def dimensions_of(
    given: Mapping[str, Any], file: SearchFile, found: Sequence[str]
) -> tuple[Dimension, ...]:
    """Return the settings to draw. Raises InputError with every fault, also those in ``found``."""
    errors = list(found)
    dimensions = tuple(filter(None, (_dimension(entry, errors) for entry in file.drawn)))
    if not file.drawn:
        errors.append(
            "A search needs at least one --search NAME=VALUES, or no --lr, which it then draws."
        )
    errors += (*_decided(given, file), *_faults(given, file, dimensions))
    if errors:  # report faults of other settings, too
        all_given = {**file.settings, **from_flags(given, errors)}
        validated({n: entry for n, entry in all_given.items() if n not in DECIDED}, errors)
    raise_errors(dict.fromkeys(errors))
    return dimensions


def _dimension(entry: SettingValue, errors: list[str]) -> Dimension | None:
    """Return a setting to draw, and add its faults to ``errors``."""
    text, origin = str(entry.value), entry.origin
    written, equals, values = text.partition("=")
    name = written.strip().removeprefix("--").replace("-", "_")
    if not equals or not values.strip():
        errors.append(f"{origin} '{text}' is not NAME=VALUES, such as lr=1e-4..1e-1:log.")
        return None
    if not is_setting(name) or name not in SEARCHED:
        why = near_setting(name, SEARCHED) if not is_setting(name) else ""
        errors.append(f"{origin} {written}: a search cannot draw this setting.{why}")
        return None
    if (found := _RANGE.fullmatch(values.strip())) is None:
        parts = tuple(part.strip() for part in values.split(","))
        if len(set(parts)) < len(parts):
            errors.append(f"{origin} {text} has a value twice.")
        return Dimension(name, parts, None, None, log=False, origin=origin)
    return _range(name, entry, found, errors)


def _range(
    name: str, entry: SettingValue, found: re.Match[str], errors: list[str]
) -> Dimension | None:
    """Return a range of numbers to draw from, and add its faults to ``errors``."""
    low, high = float(found["low"]), float(found["high"])
    log, said = found["log"] is not None, f"{entry.origin} {entry.value}"
    kind, before = SETTINGS[name].kind, len(errors)
    if kind not in (int, float):
        errors.append(f"{said}: {flag_name(name)} is not a number. List its values.")
    elif low >= high:
        errors.append(f"{said}: the first end must be below the second.")
    elif log and low <= 0:
        errors.append(f"{said}: with :log both ends must be above 0.")
    elif kind is int and (low % 1 or high % 1):
        errors.append(f"{said}: {flag_name(name)} is a whole number, so are the ends.")
    elif kind is int and high - low >= VALUES:
        errors.append(f"{said} has more than {VALUES} values. List some of them.")
    if len(errors) > before:
        return None
    ends: tuple[str, ...] = (found["low"], found["high"])
    if kind is int:
        ends = tuple(map(str, range(int(low), int(high) + 1)))
    return Dimension(name, ends, low, high, log, entry.origin)


def _decided(given: Mapping[str, Any], file: SearchFile) -> Iterator[str]:
    """Yield faults of settings that a search decides, on the command line or in the file."""
    for name, why in DECIDED.items():
        origins = {f"--{flag_name(name)}": None} if is_given(given.get(name)) else {}
        if name in file.settings:
            origins[file.settings[name].origin] = None
        for origin in origins:
            yield f"{origin} cannot be set in a search: {why}."


def _faults(
    given: Mapping[str, Any], file: SearchFile, dimensions: Sequence[Dimension]
) -> Iterator[str]:
    """Yield faults of settings that are named twice, and of code that a file names."""
    names = [dimension.name for dimension in dimensions]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"--search {flag_name(name)} is given twice. Give it once."
    for drawn in dimensions:
        said = f"{drawn.origin} {flag_name(drawn.name)}"
        if is_given(given.get(drawn.name)):
            yield f"--{flag_name(drawn.name)} and {said} contradict each other."
        elif drawn.name in file.settings:
            yield f"{file.settings[drawn.name].origin} and {said} contradict each other."
        if drawn.name == "model" and drawn.origin != "--search":
            yield from faults_of_model(drawn.values, said)
    for group in EXCLUSIVE:
        if len(both := [flag_name(name) for name in group if name in names]) > 1:
            yield f"--search {' and --search '.join(both)} contradict each other. Give one."
    count = math.prod(len(dimension.values) for dimension in dimensions)
    if count > COMBINATIONS:
        yield (
            f"--search has {count:,} combinations of values and ends of ranges. At most "
            f"{COMBINATIONS:,} can be validated before the start: list fewer values."
        )


def combinations(dimensions: Sequence[Dimension]) -> Iterator[Setting]:
    """Yield every combination of values, for a range of numbers of its ends."""
    names = [dimension.name for dimension in dimensions]
    for values in itertools.product(*(dimension.values for dimension in dimensions)):
        yield dict(zip(names, values, strict=True))


def checked(
    shared: Mapping[str, Any],
    epsilon: Any,
    file: Mapping[str, SettingValue],
    settings: Sequence[Setting],
) -> tuple[DataPlan, float, tuple[str, ...]]:
    """Validate every combination; return the dataset, the target epsilon and notes.

    Raises InputError with every fault found.
    """
    errors: dict[str, None] = {}
    notes: dict[str, None] = {}
    data, target = None, EPSILON
    for setting in settings:
        at = shared if epsilon is None else {**shared, "epsilon": epsilon}
        try:
            found = resolve({**at, **setting}, file, data=data)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
            continue
        data, target = found.plan.data, found.settings.epsilon or EPSILON
        said = (*found.chosen, *found.notes)
        notes |= dict.fromkeys(note for note in said if "no effect" not in note)
    raise_errors(errors)
    assert data is not None  # noqa: S101  (there is at least one combination)
    return data, target, tuple(notes)
