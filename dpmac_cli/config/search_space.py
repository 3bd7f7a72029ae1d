"""Search spaces: which settings a search draws, from which values, and what a trial may cost.

Every value is validated before anything is trained, and so is every combination of values. The
noise of a trial is calibrated so that the whole search meets a target epsilon. Imports no torch.
"""

import itertools
import math
import random
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpmac_cli.accounting.calibration import calibrate_search
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.selection import Search, Trials
from dpmac_cli.config.best import EPSILON
from dpmac_cli.config.fields import NUMBER, Option, flag_name
from dpmac_cli.config.flags import near_setting
from dpmac_cli.config.keywords import SettingName
from dpmac_cli.config.plan import DataPlan, SearchPlan, TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.settings import OPTIMIZER, RECIPE, SETTINGS, TASK
from dpmac_cli.config.sources import is_setting
from dpmac_cli.config.yaml_file import read_settings
from dpmac_cli.errors import InputError, raise_errors

#: Settings that a search can draw.
SEARCHED: Mapping[SettingName, Option] = {
    name: option
    for name, option in SETTINGS.items()
    if option.flag.group in (TASK, OPTIMIZER, RECIPE)
    and name not in ("dataset", "recipe", "class_weights")
    and not option.switch
}
#: Settings that a search decides itself, and why.
DECIDED: Mapping[SettingName, str] = {
    "sigma": "the noise is calibrated for the --epsilon of the whole search",
    "max_epsilon": "the noise is calibrated for the --epsilon of the whole search",
    "no_dp": "without privacy any search is free: use dpmac compare",
    "seed": "whoever knows the seed knows how many trials there were",
    "canaries": "an audit tests one run: use dpmac train --canaries",
    "guesses": "an audit tests one run: use dpmac train --canaries",
    "score_every": "only the last score of a trial decides",
    "force": "a search is only replaced by hand: delete its folder",
}
#: Most combinations to validate, and most values of a range of whole numbers.
COMBINATIONS, VALUES = 2_000, 500
#: Significant digits of a number that is drawn from a range.
DIGITS = 3
#: A trial's settings as text, by name.
Setting = Mapping[SettingName, str]
_RANGE = re.compile(rf"(?P<low>{NUMBER})\.\.(?P<high>{NUMBER})(?P<log>:log)?")


@dataclass(frozen=True)
class Dimension:
    """A setting to draw, and its values.

    Attributes:
        values: all values, equally likely; for a range of numbers its two ends.
        low, high: ends of a range of numbers; None for a list of values.
        log: whether the logarithm of a number is uniform.
        text: how it was typed.
    """

    name: SettingName
    values: tuple[str, ...]
    low: float | None
    high: float | None
    log: bool
    text: str

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


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A validated search space, and the privacy cost of a search in it.

    Attributes:
        given: settings that all trials share, by name, with the epsilon of one trial.
        file: settings file of all trials.
        data: the dataset, whose facts were read once.
        dimensions: settings to draw.
        search: trials and candidates, from which the privacy cost follows.
        plans: a plan for each candidate.
        target: epsilon of the whole search, which its cost does not exceed.
        notes: what the recipe chose, and probable mistakes.
    """

    given: Mapping[SettingName, Any]
    file: Path | None
    data: DataPlan
    dimensions: tuple[Dimension, ...]
    search: Search
    plans: tuple[TrainPlan, ...]
    target: float
    notes: tuple[str, ...] = ()

    @property
    def delta(self) -> float:
        """Delta of the search."""
        return self.plans[0].privacy.delta

    @property
    def epsilon(self) -> float:
        """Epsilon of the whole search, at most the target."""
        return self.search.epsilon(self.delta)

    def draw(self) -> Setting:
        """Return the settings of a trial, drawn at random with the operating system's bits."""
        source = random.SystemRandom()
        return {dimension.name: dimension.draw(source) for dimension in self.dimensions}

    def plan_of(self, setting: Setting, *, stop_early: bool) -> TrainPlan:
        """Return the plan of a trial. Raises ValueError if its cost was not accounted for."""
        plan = _resolved(self.given, setting, self.file, self.data)
        if events_of_trial(plan) not in self.search.candidates:
            raise ValueError("the settings of a trial are not among the candidates of its search")
        texts = tuple(dimension.text for dimension in self.dimensions)
        return replace(plan, search=SearchPlan(self.search, texts, stop_early))


def kind_of_trial(plan: TrainPlan) -> Hashable:
    """Return what trials have in common that cost and take the same: steps and network."""
    return replace(plan.privacy.event, noise_multiplier=0.0), plan.network, plan.recipe.views


def events_of_trial(plan: TrainPlan) -> tuple[TrainingEvent, ...]:
    """Return what a whole trial does to training and test records: its steps and its score."""
    privacy = plan.privacy
    if privacy.scores is None:
        raise ValueError("a trial needs covered scores: they decide which one is released")
    return privacy.event, privacy.scores.event(privacy.steps, privacy.steps)


def plan_search(
    given: Mapping[SettingName, Any],
    file: Path | None,
    texts: Sequence[str],
    trials: Trials,
    found: Sequence[str] = (),
) -> SearchSpace:
    """Validate a search space, and calibrate the noise of its trials.

    Args:
        given: settings that all trials share; ``epsilon`` is that of the whole search.
        file: YAML file of more of them.
        texts: settings to draw, such as "lr=1e-4..1e-1:log" or "clip-norm=0.1,1,10".
        trials: distribution of the number of trials.
        found: faults that were found before.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    errors = list(found)
    dimensions = tuple(filter(None, (_dimension(text, errors) for text in texts)))
    if not texts:
        errors.append("A search needs at least one --search NAME=VALUES.")
    errors += (*_decided(given, file), *_faults(given, dimensions))
    raise_errors(errors)
    shared: dict[SettingName, Any] = {n: value for n, value in given.items() if n != "epsilon"}
    settings = tuple(_combinations(dimensions))
    data, target, notes = _checked(shared, given.get("epsilon"), file, settings)
    kinds = tuple(_kinds(shared, settings, file, data, target))

    def plans_at(epsilon: float) -> tuple[TrainPlan, ...]:
        at: dict[SettingName, Any] = {**shared, "epsilon": epsilon}
        return tuple(_resolved(at, setting, file, data) for setting in kinds)

    def search_of(epsilon: float) -> Search:
        return Search(trials, tuple(dict.fromkeys(map(events_of_trial, plans_at(epsilon)))))

    delta = plans_at(target)[0].privacy.delta
    epsilon = calibrate_search(search_of, delta, target)
    return SearchSpace(
        given={**shared, "epsilon": epsilon},
        file=file,
        data=data,
        dimensions=dimensions,
        search=search_of(epsilon),
        plans=plans_at(epsilon),
        target=target,
        notes=notes,
    )


def _dimension(text: str, errors: list[str]) -> Dimension | None:
    """Return a setting to draw, and add its faults to ``errors``."""
    written, equals, values = text.partition("=")
    name = written.strip().removeprefix("--").replace("-", "_")
    if not equals or not values.strip():
        errors.append(f"--search '{text}' is not NAME=VALUES, such as lr=1e-4..1e-1:log.")
        return None
    if not is_setting(name) or name not in SEARCHED:
        why = near_setting(name, SEARCHED) if not is_setting(name) else ""
        errors.append(f"--search {written}: a search cannot draw this setting.{why}")
        return None
    if (found := _RANGE.fullmatch(values.strip())) is None:
        parts = tuple(part.strip() for part in values.split(","))
        if len(set(parts)) < len(parts):
            errors.append(f"--search {text} has a value twice.")
        return Dimension(name, parts, None, None, False, text)
    return _range(name, text, found, errors)


def _range(
    name: SettingName, text: str, found: re.Match[str], errors: list[str]
) -> Dimension | None:
    """Return a range of numbers to draw from, and add its faults to ``errors``."""
    low, high = float(found["low"]), float(found["high"])
    log = found["log"] is not None
    kind, before = SETTINGS[name].kind, len(errors)
    if kind not in (int, float):
        errors.append(f"--search {text}: {flag_name(name)} is not a number. List its values.")
    elif low >= high:
        errors.append(f"--search {text}: the first end must be below the second.")
    elif log and low <= 0:
        errors.append(f"--search {text}: with :log both ends must be above 0.")
    elif kind is int and (low % 1 or high % 1):
        errors.append(f"--search {text}: {flag_name(name)} is a whole number, so are the ends.")
    elif kind is int and high - low >= VALUES:
        errors.append(f"--search {text} has more than {VALUES} values. List some of them.")
    if len(errors) > before:
        return None
    ends: tuple[str, ...] = (found["low"], found["high"])
    if kind is int:
        ends = tuple(map(str, range(int(low), int(high) + 1)))
    return Dimension(name, ends, low, high, log, text)


def _decided(given: Mapping[SettingName, Any], file: Path | None) -> Iterator[str]:
    """Yield faults of settings that a search decides, on the command line or in the file."""
    written = {} if file is None else read_settings(file, [])  # its faults are reported later
    for name, why in DECIDED.items():
        origins = {} if given.get(name) in (None, False) else {f"--{flag_name(name)}": None}
        if name in written and written[name].value not in (None, False):
            origins[written[name].origin] = None
        for origin in origins:
            yield f"{origin} cannot be set in a search: {why}."


def _faults(given: Mapping[SettingName, Any], dimensions: Sequence[Dimension]) -> Iterator[str]:
    """Yield faults of settings that are named twice."""
    names = [dimension.name for dimension in dimensions]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"--search {flag_name(name)} is given twice. Give it once."
        if given.get(name) not in (None, False):
            yield f"--{flag_name(name)} and --search {flag_name(name)} contradict each other."
    if {"epochs", "steps"} <= set(names):
        yield "--search epochs and --search steps contradict each other. Give one."
    count = math.prod(len(dimension.values) for dimension in dimensions)
    if count > COMBINATIONS:
        yield (
            f"--search has {count:,} combinations of values and ends of ranges. At most "
            f"{COMBINATIONS:,} can be validated before the start: list fewer values."
        )


def _combinations(dimensions: Sequence[Dimension]) -> Iterator[Setting]:
    names = [dimension.name for dimension in dimensions]
    for values in itertools.product(*(dimension.values for dimension in dimensions)):
        yield dict(zip(names, values, strict=True))


def _checked(
    shared: Mapping[SettingName, Any],
    epsilon: Any,
    file: Path | None,
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
            found = resolve({**at, **setting}, file, cover_scores=True, data=data)
        except InputError as failure:
            errors |= dict.fromkeys(failure.errors)
            continue
        data, target = found.plan.data, found.settings.epsilon or EPSILON
        said = (*found.chosen, *found.notes)
        notes |= dict.fromkeys(note for note in said if "no effect" not in note)
    raise_errors(errors)
    assert data is not None  # noqa: S101  (there is at least one combination)
    return data, target, tuple(notes)


def _kinds(
    shared: Mapping[SettingName, Any],
    settings: Sequence[Setting],
    file: Path | None,
    data: DataPlan,
    target: float,
) -> Iterator[Setting]:
    """Yield one combination of each kind: with another privacy cost, or another network."""
    seen = set()
    for setting in settings:
        plan = _resolved({**shared, "epsilon": target}, setting, file, data)
        kind = kind_of_trial(plan)
        if kind not in seen:
            seen.add(kind)
            yield setting


def _resolved(
    given: Mapping[SettingName, Any], setting: Setting, file: Path | None, data: DataPlan
) -> TrainPlan:
    return resolve({**given, **setting}, file, cover_scores=True, data=data).plan
