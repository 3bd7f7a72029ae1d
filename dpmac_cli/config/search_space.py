"""Search spaces: settings to draw, and what a trial may cost.

The noise of a trial is calibrated so that the whole search meets a target epsilon. Imports no
torch.
"""

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from dpmac_cli.accounting.calibration import calibrate_search
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.selection import Search, Trials, trials_of
from dpmac_cli.config.dimensions import (
    DIGITS,
    Dimension,
    Setting,
    checked,
    combinations,
    dimensions_of,
)
from dpmac_cli.config.plan import DataPlan, SearchPlan, TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.config.search_file import SearchFile, drawn_texts, is_search, read_search
from dpmac_cli.config.search_flags import MEAN_NEAR, SearchFlags
from dpmac_cli.config.sources import SettingValue, is_given
from dpmac_cli.config.transfer import Transfer, judge_of, plan_transfer
from dpmac_cli.errors import InputError

#: Factor by which the learning rate is at most larger or smaller than its default, by default.
NEAR = 2.0


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """A validated search space, and the privacy cost of a search in it.

    Attributes:
        given: settings that all trials share, by name, with the epsilon of one trial.
        file: settings of all trials from their file.
        data: the dataset, whose facts were read once.
        judge: public data whose test records decide which trial is best; None for covered scores.
        dimensions: settings to draw.
        search: trials and candidates, from which the privacy cost follows.
        plans: a plan for each candidate.
        notes: what the recipe chose, and probable mistakes.
    """

    given: Mapping[str, Any]
    file: Mapping[str, SettingValue]
    data: DataPlan
    judge: DataPlan | None
    dimensions: tuple[Dimension, ...]
    search: Search
    plans: tuple[TrainPlan, ...]
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
        judge = None if self.judge is None else self.judge.found.name
        return replace(plan, search=SearchPlan(self.search, texts, stop_early, judge))


def kind_of_trial(plan: TrainPlan) -> Hashable:
    """Return what trials have in common that cost and take the same: steps and network."""
    return replace(plan.privacy.event, noise_multiplier=0.0), plan.network, plan.recipe.views


def events_of_trial(plan: TrainPlan) -> tuple[TrainingEvent, ...]:
    """Return what a whole trial does to training and test records: its steps and its score."""
    privacy = plan.privacy
    if privacy.scores is None:
        raise ValueError("a trial needs covered scores: they decide which one is released")
    return privacy.event, privacy.scores.event(privacy.steps, privacy.steps)


def ask_search(
    given: Mapping[str, Any],
    search: Mapping[str, Any],
    drawn: Mapping[str, object] | Sequence[str],
    file: Path | None,
) -> tuple[SearchFlags, SearchSpace | Transfer]:
    """Return the settings of a search itself, and its validated space.

    Args:
        given: settings that all trials share, by name.
        search: settings of the search itself: fields of :class:`SearchFlags`.
        drawn: settings to draw, as in :func:`~dpmac_cli.config.search_file.drawn_texts`.
        file: YAML file of all of these, over which the others take precedence.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    errors: list[str] = []
    typed = cast(dict[str, Any], {n: v for n, v in given.items() if is_given(v)})
    recipe = typed.pop("recipe") if is_search(typed.get("recipe")) else None
    read = read_search(file, recipe, errors).fixed(typed)
    whole = read.below(SearchFile(drawn=drawn_texts(drawn, "--search", errors)))
    before = len(errors)
    own = {name: value for name, value in search.items() if is_given(value)}
    if not whole.drawn:
        own = own if "trials" in read.search else {"trials": MEAN_NEAR, **own}
        whole = replace(whole, drawn=near_default(typed, whole))
    flags = read.flags(own, errors)
    if flags.on is not None:
        return flags, plan_transfer(typed, whole, flags, errors)
    trials = trials_of(flags.trials)
    if len(errors) == before:
        try:
            trials = trials_of(flags.trials, flags.most_trials)
        except InputError as failure:
            errors += failure.errors
    return flags, plan_search(typed, whole, trials, errors, flags.score_on)


def near_default(given: Mapping[str, Any], file: SearchFile) -> tuple[SettingValue, ...]:
    """Return the settings that a search draws without ``--search``: only the learning rate.

    Its default depends on public facts only, so the range may, too. On small data the default is
    hard to beat, and a trial with other settings costs more than it finds (docs/tuning.md).

    Returns nothing if the rate is given. Raises InputError if there is no default.
    """
    if is_given(given.get("lr")) or "lr" in file.settings:
        return ()
    rate = resolve(given, file.settings).plan.optimizer.hyper.lr
    text = f"lr={rate / NEAR:.{DIGITS}g}..{rate * NEAR:.{DIGITS}g}:log"
    return (SettingValue(text, "the default search"),)


def plan_search(
    given: Mapping[str, Any],
    file: SearchFile,
    trials: Trials,
    found: Sequence[str] = (),
    score_on: str | None = None,
) -> SearchSpace:
    """Validate a search space, and calibrate the noise of its trials.

    Args:
        given: settings that all trials share; ``epsilon`` is that of the whole search.
        file: settings to draw, and more of those that all trials share.
        trials: distribution of the number of trials. found: faults that were found before.
        score_on: public data whose test records decide; None for covered scores.

    Raises:
        InputError: lists every fault found.
        BudgetError: no noise meets the target epsilon.
    """
    dimensions = dimensions_of(given, file, found)
    shared: dict[str, Any] = {n: value for n, value in given.items() if n != "epsilon"}
    shared["cover_scores"] = True
    settings = tuple(combinations(dimensions))
    data, target, notes = checked(shared, given.get("epsilon"), file.settings, settings)
    judge = None if score_on is None else judge_of(shared, file.settings, score_on, data)
    every = _Candidates(trials, shared, file.settings, data, settings)
    of_kind = {kind_of_trial(plan): setting for plan, setting in every.at(target)}
    candidates = replace(every, settings=tuple(of_kind.values()))
    delta = next(plan for plan, _ in candidates.at(target)).privacy.delta
    epsilon = calibrate_search(candidates.search, delta, target)
    return SearchSpace(
        given={**shared, "epsilon": epsilon},
        file=file.settings,
        data=data,
        judge=judge,
        dimensions=dimensions,
        search=candidates.search(epsilon),
        plans=tuple(plan for plan, _ in candidates.at(epsilon)),
        notes=notes,
    )


@dataclass(frozen=True)
class _Candidates:
    """Trials with some settings each, at any epsilon of one trial.

    Attributes:
        trials: distribution of their number.
        shared, file: settings that all trials share, from flags and from a file.
        data: the dataset.
        settings: settings to draw, one combination for each candidate.
    """

    trials: Trials
    shared: Mapping[str, Any]
    file: Mapping[str, SettingValue]
    data: DataPlan
    settings: tuple[Setting, ...]

    def at(self, epsilon: float) -> Iterator[tuple[TrainPlan, Setting]]:
        """Yield the plan of each candidate, and its settings."""
        given: dict[str, Any] = {**self.shared, "epsilon": epsilon}
        for setting in self.settings:
            yield _resolved(given, setting, self.file, self.data), setting

    def search(self, epsilon: float) -> Search:
        """Return the search among the candidates."""
        events = (events_of_trial(plan) for plan, _ in self.at(epsilon))
        return Search(self.trials, tuple(dict.fromkeys(events)))


def _resolved(
    given: Mapping[str, Any],
    setting: Setting,
    file: Mapping[str, SettingValue],
    data: DataPlan,
) -> TrainPlan:
    return resolve({**given, **setting}, file, data=data).plan
