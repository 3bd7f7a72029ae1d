"""Search spaces: settings to draw, and the noise with which a whole search meets its epsilon.

Every value is validated before anything is trained, and so is every combination. Imports no torch.
"""

import hashlib
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpmac_cli.accounting.calibration import calibrate_search
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.selection import Search, trials_of
from dpmac_cli.accounting.statements import cost_in_words, format_epsilon
from dpmac_cli.config.defaults import EPSILON
from dpmac_cli.config.findings import private_notes
from dpmac_cli.config.flags import Fields, Flags, flag_name, is_switch, kind_of
from dpmac_cli.config.plan import Plan
from dpmac_cli.config.settings import GROUPS, OPTIMIZER, RECIPE, SETTINGS, TASK, MeanTrials
from dpmac_cli.errors import InputError, raise_errors
from dpmac_cli.files import cache_folder
from dpmac_cli.runs.resolve import resolve
from dpmac_cli.studies.grid import MOST, RANGE, combinations, read_values, resolved

if TYPE_CHECKING:
    from dpmac_cli.data.dataset import Dataset

#: Mean number of trials: of a search over given settings, and of one near the default.
MEAN, MEAN_NEAR = 20, 4
#: Factor by which the learning rate is at most larger or smaller than its default, by default.
NEAR = 2.0
#: Significant digits of a number that is drawn from a range.
DIGITS = 3
RELEASED = "Nothing of the search was released, so no epsilon was spent."
RESTARTED = f"The last search in this folder was stopped, so it is started again. {RELEASED}"
#: Settings that a search decides itself, and why.
DECIDED: Mapping[str, str] = {
    "sigma": "the noise is calibrated for the {epsilon} of the whole search",
    "max_epsilon": "the noise is calibrated for the {epsilon} of the whole search",
    "no_dp": "without privacy any search is free: use dpmac compare",
    "seed": "whoever knows the seed knows how many trials there were",
    "canaries": "an audit tests one run: use dpmac train --canaries",
    "force": "a search is only replaced by hand: delete its folder",
}
#: Settings of the groups that a search draws from which it does not draw.
FIXED = ("dataset", "recipe", "class_weights", "shares", "threshold")


def _is_drawn(name: str) -> bool:
    """Return whether a search can draw a setting: one with several values that trials may have."""
    of_training = GROUPS[name] in (TASK, OPTIMIZER, RECIPE)
    return of_training and name not in FIXED and not is_switch(SETTINGS[name])


#: Settings that a search can draw.
SEARCHED: Fields = {name: field for name, field in SETTINGS.items() if _is_drawn(name)}


class SearchFlags(Flags, frozen=True):
    """Settings of a search itself, beside those of its trials."""

    trials: MeanTrials = MEAN
    """Mean number of trials. The number itself is random and secret. [default: 20; without settings
    to draw 4]"""


@dataclass(frozen=True)
class Dimension:
    """A setting to draw at random.

    Attributes:
        name: name of the setting.
        values: its values, equally likely; or the ends of a range.
        between: whether a number is drawn from the range, with a uniform logarithm.
    """

    name: str
    values: tuple[Any, ...]
    between: bool = False

    @property
    def text(self) -> str:
        """Return it as it is typed: "lr=1e-4:0.1"."""
        sign = ":" if self.between else ","
        return f"{flag_name(self.name)}={sign.join(self.values)}"

    def draw(self, source: random.Random) -> Any:
        """Return a random value, independent of all others.

        Args:
            source: generator of random numbers.
        """
        if not self.between:
            return source.choice(self.values)
        low, high = map(float, self.values)
        number = math.exp(source.uniform(math.log(low), math.log(high)))
        rounded = float(f"{number:.{DIGITS}g}")
        return f"{min(max(rounded, low), high):.15g}"  # rounding may pass an end


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A validated search space, and the privacy cost of a search in it.

    Attributes:
        shared: settings that all trials share, by name, with the epsilon of one trial.
        data: your own dataset, read once; None for a registered one.
        dimensions: settings to draw.
        search: trials and candidates, from which the privacy cost follows.
        plans: a plan for each candidate.
        out: folder of the search, and of the run that it publishes.
        notes: what the recipe chose, and probable mistakes.
    """

    shared: Mapping[str, Any]
    data: "Dataset | None" = field(repr=False)
    dimensions: tuple[Dimension, ...]
    search: Search
    plans: tuple[Plan, ...]
    out: Path
    notes: tuple[str, ...] = ()

    @property
    def private_notes(self) -> tuple[str, ...]:
        """Return notes on the records, for the person who holds them."""
        return () if self.data is None else private_notes(self.plans[0], self.data.notes)

    @property
    def epsilon(self) -> float:
        """Return epsilon of the whole search, at most the target."""
        return self.search.epsilon(self.plans[0].settings.delta)

    def lines(self) -> Iterator[str]:
        """Yield lines on what is searched, how many trials there are, and what they cost.

        All of it is public: the number of trials is not drawn yet.
        """
        trials, delta = self.search.trials, self.plans[0].settings.delta
        yield f"search on {self.plans[0].facts.name} over:"
        for dimension in self.dimensions:
            yield f"  {dimension.text}"
        yield (
            f"trials: K is drawn in secret, P(K = k) proportional to w^k / k for k from 1 to "
            f"{trials.most:,}, log w = {trials.log_weight:.4g}; its mean is {trials.mean:g}"
        )
        for event in dict.fromkeys(candidate.event for candidate in self.plans):
            yield f"  {event.steps:,} steps with noise multiplier {event.noise_multiplier:g}"
        of_a_trial = format_epsilon(self.search.trial_epsilon(delta))
        yield f"one trial: epsilon {of_a_trial}, with its covered score"
        yield f"search and model together: {cost_in_words(self.epsilon, delta)}"

    def trial(self) -> Plan:
        """Return the plan of a trial, drawn at random with the operating system's bits.

        Each call draws all settings again, independently.
        """
        source = random.SystemRandom()
        return self.plan_of(
            {dimension.name: dimension.draw(source) for dimension in self.dimensions}
        )

    def plan_of(self, values: Mapping[str, Any]) -> Plan:
        """Return the plan of a trial, with the noise of the search.

        Its epsilon is None, because it is not what the published run costs.

        Args:
            values: values of the settings that are drawn, by name.

        Raises:
            ValueError: its cost was not accounted for.
            InputError: the values are not possible.
        """
        plan = resolve({**self.shared, **values}, data=self.data).plan
        if events_of_trial(plan) not in self.search.candidates:
            raise ValueError("the settings of a trial are not among the candidates of its search")
        # The epsilon of a trial is not that of the run that is published.
        settings = plan.settings.replace(sigma=plan.event.noise_multiplier, epsilon=None)
        return replace(plan, settings=settings, search=self.search)


def secret_place(out: Path) -> Path:
    """Return the folder beside the cache where a search keeps its current trial. It need not exist.

    Args:
        out: folder of the search, by whose path the other one is found again.
    """
    digest = hashlib.sha256(os.fsencode(out.absolute())).hexdigest()[:16]
    return cache_folder().with_name(f"search-{digest}")


def events_of_trial(plan: Plan) -> tuple[TrainingEvent, ...]:
    """Return what a whole trial does to training and test records, in the order of its account.

    Args:
        plan: plan of a trial.

    Raises:
        ValueError: it has no covered score.
    """
    if plan.score is None:
        raise ValueError("a trial needs a covered score: it decides which one is released")
    return plan.all_planned


def plan_search(
    settings: Mapping[str, Any], file: Path | None = None, out: Path | None = None
) -> SearchSpace:
    """Validate a search space, and calibrate the noise of its trials.

    Args:
        settings: settings by name, with ``trials``. Those with several values ("0.1,1,10", or a
            list) or a range of numbers ("1e-4:0.1") are drawn, without any the learning rate near
            its default. ``epsilon`` is that of the whole search.
        file: YAML file of the same, over which ``settings`` take precedence.
        out: folder of the search; None for that of the settings, or runs/tune.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    errors: list[str] = []
    flags, values = read_values(SearchFlags, settings, file, errors)
    for name, reason in DECIDED.items():
        if name in values:
            errors.append(f"{{{name}}} cannot be set in a search: {reason}.")
    drawn = tuple(_dimensions(values, errors))
    raise_errors(errors)
    shared = dict[str, Any]()
    for name, listed in values.items():
        shared[name] = listed[0]
    for dimension in drawn:
        del shared[dimension.name]
    shared["cover_scores"] = True
    mean = flags.trials
    if not drawn:
        drawn = (near_default(shared),)
        mean = mean if flags.explicit else MEAN_NEAR
    return _calibrated(shared, drawn, mean, out or Path(shared.get("out", "runs/tune")))


def near_default(shared: Mapping[str, Any]) -> Dimension:
    """Return what a search draws by default: only the learning rate.

    Its default depends on public facts only, so the range may, too. On small data the default is
    hard to beat, and a trial with other settings costs more than it finds (docs/tuning.md).

    Args:
        shared: settings that all trials share, by name.

    Raises:
        InputError: the rate is given, or there is no default.
    """
    if "lr" in shared:
        raise_errors(
            ["A search needs a setting to draw, such as {lr=}1e-4:0.1, or no {lr} to draw it."]
        )
    rate = resolve(shared).plan.optimizer.lr
    ends = (f"{rate / NEAR:.{DIGITS}g}", f"{rate * NEAR:.{DIGITS}g}")
    return Dimension("lr", ends, between=True)


def _dimensions(values: Mapping[str, list[Any]], errors: list[str]) -> Iterator[Dimension]:
    """Yield settings to draw: those with several values, and numbers with a range.

    Args:
        values: values of each setting, by its name.
        errors: faults are added to these.
    """
    for name, listed in values.items():
        typed = f"{{{name}=}}{','.join(map(str, listed))}"
        kind = kind_of(SETTINGS[name])
        is_number = kind in (int, float)
        is_one_value = len(listed) == 1
        is_range = is_number and is_one_value and RANGE.fullmatch(str(listed[0])) is not None
        if is_one_value and not is_range:
            continue
        if name not in SEARCHED:
            errors.append(f"{typed}: a search cannot draw this setting. Give one value.")
        elif is_range:
            low, high = listed[0].split(":")
            if kind is int:
                errors.append(f"{typed}: it is a whole number. List its values, such as 5,10,20.")
            elif not 0 < float(low) < float(high):
                errors.append(f"{typed}: the ends must be above 0, and the first below the second.")
            yield Dimension(name, (low, high), between=True)
        else:
            if len(set(listed)) < len(listed):
                errors.append(f"{typed} has a value twice.")
            yield Dimension(name, tuple(map(str, listed)))


def _calibrated(
    shared: dict[str, Any], drawn: tuple[Dimension, ...], mean: float, out: Path
) -> SearchSpace:
    """Return the space with the noise of its trials.

    The whole search meets the target: more noise is added until the selection among a random number
    of trials, each at most as expensive as the most expensive candidate, costs at most that.

    Args:
        shared: settings that all trials share, by name.
        drawn: settings to draw.
        mean: mean number of trials.
        out: folder of the search.

    Raises:
        InputError, BudgetError: as in :func:`plan_search`.
    """
    space = list[str]()
    values = dict[str, Sequence[Any]]()
    for name, value in shared.items():
        values[name] = [value]
    for dimension in drawn:
        space.append(dimension.text)
        values[dimension.name] = dimension.values
    count = math.prod(map(len, values.values()))
    if count > MOST:
        raise InputError(f"{count:,} combinations of values and ends of ranges; at most {MOST:,}.")
    trials = list(combinations(values))
    results, notes = resolved(trials, same_data=True)
    # One trial for each privacy cost: the others cost the same at every noise.
    different = dict[tuple[TrainingEvent, ...], dict[str, Any]]()
    for result, trial in zip(results, trials, strict=True):
        different[events_of_trial(result.plan)] = trial
    data = results[0].data
    settings = results[0].plan.settings

    def plans(epsilon: float) -> tuple[Plan, ...]:
        plans_of_trials = list[Plan]()
        for trial in different.values():
            plans_of_trials.append(resolve({**trial, "epsilon": epsilon}, data=data).plan)
        return tuple(plans_of_trials)

    def search(epsilon: float) -> Search:
        candidates = dict.fromkeys(map(events_of_trial, plans(epsilon)))
        return Search(trials_of(mean), tuple(candidates), tuple(space))

    target = settings.epsilon or EPSILON
    epsilon = calibrate_search(search, settings.delta, target)
    if secret_place(out).exists():
        notes = (*notes, RESTARTED)
    return SearchSpace(
        shared={**shared, "epsilon": epsilon},
        data=data,
        dimensions=drawn,
        search=search(epsilon),
        plans=plans(epsilon),
        out=out,
        notes=notes,
    )
