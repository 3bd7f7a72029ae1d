"""Plan of a training run: completed settings, facts of its records, its privacy event.

Everything that a run needs to know before it reads records is here, once: what is not stored is a
property of what is. :func:`~dpmac_cli.config.planning.plan` makes a plan. No module of it loads
torch, so that costs and faults are printed at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import calibrate_noise, noise_of_share
from dpmac_cli.accounting.events import TrainingEvent, histogram_event, score_event
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.accounting.selection import Search
from dpmac_cli.accounting.statements import short, unit_of
from dpmac_cli.config.datasets import Dataset
from dpmac_cli.config.encoder_folder import read_encoder
from dpmac_cli.config.encoders import TextEncoder
from dpmac_cli.config.facts import DataFacts
from dpmac_cli.config.flags import near
from dpmac_cli.config.networks import (
    BACKBONES,
    FEATURES,
    Backbone,
    BuiltIn,
    Features,
    Trained,
    UserModel,
    parse_model,
)
from dpmac_cli.config.records import COUNTED, Table
from dpmac_cli.config.settings import (
    DATA,
    GROUPS,
    HISTOGRAM,
    OPTIMIZER,
    PRIVATE_SCALE,
    SETTINGS,
    Settings,
)
from dpmac_cli.config.sources import over
from dpmac_cli.errors import InputError, first_fault, raise_errors
from dpmac_cli.optim import OPTIMIZERS, Optimizer
from dpmac_cli.tasks.regression import Regression

#: Settings that do not describe a run, which config.yaml does not have.
NOT_RECORDED = (
    *("seed", "data_dir", "checkpoint_every", "out"),
    *("force", "json", "quiet", "debug"),
)


@dataclass(frozen=True)
class Plan:
    """Training run that is about to begin. Its records are not read again.

    Attributes:
        settings: settings as the user gave them, completed with every default.
        facts: facts of the records, read once.
        event: accounting event of all steps; its noise is 0 without privacy.
        optimizer: update rule with its hyperparameters.
        search: search that the run is one trial of; None if it is a run by itself.
        histogram: event of the histogram that the model is calibrated by; None without.
        ranges: events of the counts that ranges of columns follow from, before training.
        ranged: whether these ranges are kept from an earlier part of the run, which paid for them.
        budget: account that the run is booked in, with others on the same records; None without.
    """

    settings: Settings
    facts: DataFacts
    event: TrainingEvent
    optimizer: Optimizer
    search: Search | None = None
    histogram: TrainingEvent | None = None
    ranges: tuple[TrainingEvent, ...] = ()
    ranged: bool = False
    budget: Account | None = field(default=None, compare=False)

    @property
    def places(self) -> int:
        """Return n, the number of records or units that may be drawn, with those of an audit."""
        return self.facts.train_size + (self.settings.canaries or 0)

    @property
    def planned(self) -> tuple[TrainingEvent, ...]:
        """Return all events on training records: steps, counts of ranges, the last histogram."""
        return (self.event, *self.counts)

    @property
    def all_planned(self) -> tuple[TrainingEvent, ...]:
        """Return all events, also that of a covered score on test records."""
        return self.planned if self.score is None else (*self.planned, self.score)

    @property
    def counts(self) -> tuple[TrainingEvent, ...]:
        """Return the events of all histograms of training records; () without any."""
        return self.ranges if self.histogram is None else (*self.ranges, self.histogram)

    @property
    def private(self) -> bool:
        """Return whether gradients are clipped and noise is added."""
        return not self.settings.no_dp

    @property
    def counted_columns(self) -> tuple[str, ...]:
        """Return the names of the columns whose range and ranks follow from counts; () for none."""
        if self.facts.schema is None:
            return ()
        ranked = self.settings.scale == PRIVATE_SCALE
        names = list[str]()
        for column in self.facts.schema.columns:
            if column.counted or (ranked and column.ranged):
                names.append(column.name)
        return tuple(names)

    @property
    def counts_target(self) -> bool:
        """Return whether noisy counts of the targets, paid for, decide the range to predict in.

        False for classes, and for a declared range that is used as it is: see the function
        :func:`counts_target`.
        """
        return counts_target(self.settings, self.facts)

    @property
    def max_epsilon(self) -> float:
        """Return the epsilon to stop before; infinity for no limit."""
        return self.settings.max_epsilon or math.inf

    @property
    def unit(self) -> str:
        """Return the unit of privacy in words, such as "record"."""
        return unit_of(covered=self.settings.cover_scores, several=bool(self.facts.unit))

    @property
    def account_unit(self) -> tuple[str, str]:
        """Return the unit of privacy as accounts have it: its name, and what tells units apart."""
        return short(self.unit), self.facts.unit

    @property
    def of_account(self) -> dict[str, Any]:
        """Return what an account of the run takes from its plan, by the names of its attributes."""
        return {
            "delta": self.settings.delta,
            "max_epsilon": self.max_epsilon,
            "unit": self.account_unit,
            "seeded": self.settings.seed is not None,
            "secure": self.settings.secure,
        }

    @cached_property
    def score(self) -> TrainingEvent | None:
        """Return the event of the test score, if it covers the test records; None if it is exact.

        It costs at most as much as training. Raises BudgetError if no noise does.
        """
        if not self.settings.cover_scores:
            return None
        delta = self.settings.delta
        target = min(total_epsilon(self.planned, delta), self.max_epsilon)
        return score_event(calibrate_noise(score_event(0.0), delta, target))

    @property
    def model(self) -> BuiltIn | UserModel:
        """Return the network to train."""
        return parse_model(self.settings.model)

    @cached_property
    def features(self) -> Features | None:
        """Return the features that the network takes instead of records; None for records.

        Raises InputError if the network that computes them cannot be used.
        """
        settings = self.settings
        if settings.backbone is not None and settings.backbone not in BACKBONES:
            causal = self.facts.task.network is not None
            return read_encoder(settings.backbone).of(self.facts.records, causal=causal)
        if settings.backbone is not None and settings.backbone_size is not None:
            return Backbone(settings.backbone, settings.backbone_size, settings.backbone_flips)
        return None if settings.features is None else FEATURES[settings.features]

    @property
    def pretrained(self) -> Path | None:
        """Return the file of public weights to start from; None without one.

        Weights of a backbone are not meant: they belong to :attr:`features`.
        """
        return None if self.settings.pretrained is None else Path(self.settings.pretrained)

    @property
    def trained(self) -> Trained:
        """Return the trained part of the network."""
        settings = self.settings
        return Trained(settings.train or "all", settings.lora_rank or Trained.rank)

    @property
    def starts_public(self) -> bool:
        """Return whether the network starts from public weights."""
        return self.pretrained is not None or isinstance(self.features, Backbone | TextEncoder)

    @property
    def records_in_a_step(self) -> int:
        """Return the number of records that are drawn from each unit of privacy in a step."""
        return self.settings.records_per_unit if self.facts.unit else 1

    @property
    def inputs(self) -> int:
        """Return the number of network inputs per unit of privacy and step, with all views."""
        return self.records_in_a_step * (self.settings.augmentations or 1)

    @property
    def recorded(self) -> dict[str, Any]:
        """Return the settings that describe the run, which config.yaml and checkpoints keep.

        Those of a dataset are among them if it is your own.
        """
        recorded = dict[str, Any]()
        for name in SETTINGS:
            value = getattr(self.settings, name)
            of_registered_data = GROUPS[name] == DATA and not self.facts.user_supplied
            if value is not None and name not in NOT_RECORDED and not of_registered_data:
                recorded[name] = value
        recorded["dataset"] = self.facts.typed
        if not isinstance(self.model, UserModel):
            recorded.pop("fix_norm")
        if not self.facts.records.standardised:
            recorded.pop("standardise")
        return recorded

    @property
    def stem(self) -> str:
        """Return the beginning of the name of a new folder in runs/, before its number."""
        no_dp = "" if self.private else "-no-dp"
        return f"{self.facts.name}-{self.optimizer.name}{no_dp}"

    @property
    def timed(self) -> bool:
        """Return whether measured times are published.

        Those of a trial are not: the first trial of a process is slower than the others.
        """
        return self.search is None

    def __getstate__(self) -> dict[str, Any]:
        """Return the plan for another process, without records in memory."""
        settings = self.settings.replace(dataset=self.facts.typed)
        return {**vars(self), "settings": settings}

    def on(self, device: str) -> "Plan":
        """Return the plan of the same run on another device, such as "cuda:1"."""
        return replace(self, settings=self.settings.replace(device=device))

    def placed(self, folder: Path, *, force: bool = False) -> "Plan":
        """Return the plan of the same run in another folder.

        Args:
            folder: folder of the run.
            force: whether a run that is there is replaced.
        """
        return replace(self, settings=self.settings.replace(out=folder, force=force))


def with_noise(recorded: Mapping[str, Any], event: TrainingEvent) -> Mapping[str, Any]:
    """Return settings of a run with the noise of its event instead of a target, if they have one.

    Args:
        recorded: :attr:`Plan.recorded`, or those of a file of them.
        event: event of the run, with its noise multiplier.
    """
    if "epsilon" not in recorded:
        return recorded
    return over({"sigma": event.noise_multiplier}, recorded)


def optimizer_of(settings: Settings) -> Optimizer:
    """Return the optimizer of completed settings, with its hyperparameters.

    Raises:
        InputError: a user-supplied optimizer has fields that are no settings, or they cannot have
            these values.
    """
    kind = OPTIMIZERS[settings.optimizer]
    known = [name for name, group in GROUPS.items() if group == OPTIMIZER and name != "optimizer"]
    errors, hyperparameters = list[str](), dict[str, Any]()
    for name in kind.used():
        if name in known:
            hyperparameters[name] = getattr(settings, name)
        else:
            errors.append(
                f"{{optimizer=}}{kind.name} has the field {name}, which is not a setting of "
                f"optimizers.{near(name, known)} Its fields are some of {', '.join(known)}. "
                "Declare any other number as a ClassVar."
            )
    raise_errors(errors)
    try:
        return kind(**hyperparameters)
    except ValidationError as failure:
        raise InputError(
            f"{{optimizer=}}{kind.name} cannot have these settings ({first_fault(failure)}). Use "
            "another value, or declare a default of the field."
        ) from failure


def event_of(settings: Settings, records: int) -> TrainingEvent:
    """Return the accounting event of a run of completed settings, with the noise that they have.

    Each crafted record of an audit has a place among the n, whether it is in or not.

    Args:
        settings: completed settings. A noise multiplier that is still to be calibrated is 0.
        records: number of training records, or units.
    """
    places = records + (settings.canaries or 0)
    per_epoch = max(1, math.ceil(places / settings.batch_size))
    steps = settings.epochs * per_epoch if settings.epochs is not None else settings.steps or 0
    rate = settings.batch_size / places
    rate = min(1.0, rate)  # a batch that is too large is refused with all other faults
    return TrainingEvent(
        rate,
        settings.sigma or 0.0,
        steps,
        settings.sampler,
        per_epoch,
        overflow=overflow_of(settings.delta),
    )


#: Shares of mu^2 of the whole run, mu being that of Gaussian differential privacy: of a histogram
#: for calibration, and of each round of counts that ranges of columns follow from.
SHARE, ROUNDS = 0.02, (0.02, 0.03, 0.05)
#: The same of the rounds for the range of a number to predict, and of its mean and spread.
ROUNDS_OF_TARGET, MOMENTS = (0.006, 0.009, 0.015), 0.05


def counts_target(settings: Settings, facts: Dataset) -> bool:
    """Return whether noisy histograms of the targets, before the first step, decide their range.

    Their cost is in epsilon. They do so if no range is declared. Otherwise it is found inside the
    declared one where ranges of columns are, too.

    Args:
        settings: completed settings.
        facts: public facts of the records.
    """
    task = facts.task
    counted = isinstance(task, Regression) and task.calibrates
    return task.open or (counted and settings.scale == PRIVATE_SCALE)


#: Expected number of records to count for calibration: of each twenty that the steps draw, one, so
#: that counting takes a small part of the time of training; at least 100 times the noise.
DRAWN_PER_COUNTED, LEAST_OVER_NOISE = 20, 100
#: Shares of counts before training, and of the histogram after it, if there is one.
Shares = tuple[tuple[float, ...], tuple[float, ...]]


def shares_of_counts(settings: Settings, facts: Dataset) -> Shares:
    """Return the shares of the budget for the histograms of a run; none without privacy.

    Args:
        settings: completed settings.
        facts: public facts of the records.
    """
    if settings.no_dp:
        return (), ()
    records, before = facts.records, tuple[float, ...]()
    if isinstance(records, Table) and records.count(*COUNTED):
        before = ROUNDS
    if counts_target(settings, facts):
        before = (*before, *ROUNDS_OF_TARGET, MOMENTS)
    after = (SHARE,) if settings.calibration == HISTOGRAM else ()
    return before, after


def histograms_of(
    epsilon: float | None, delta: float, event: TrainingEvent, shares: Shares, records: int
) -> tuple[tuple[TrainingEvent, ...], tuple[TrainingEvent, ...]]:
    """Return the events of counts before training, and of the histogram after it, if there is one.

    The budget that they share is the target epsilon, or where noise is given (None) what the steps
    of the run cost together with them. If fewer than all training records are to be counted after
    training, each is drawn independently, and the histogram costs less than its share.

    Args:
        epsilon, delta: target; None for epsilon if noise is given.
        event: steps of the run.
        shares: see :func:`shares_of_counts`.
        records: number of training records, or units.

    Returns:
        Events of counts before training, one for each share, and of the histogram after it.
    """
    before, after = shares
    if not (before or after):
        return (), ()
    whole = 1.0  # of the budget, in units of mu^2
    if epsilon is None:
        epsilon = total_epsilon((event,), delta)
        whole = 1 / (1 - sum((*before, *after)))
    noises = list[float]()
    for share in (*before, *after):
        noises.append(noise_of_share(epsilon, delta, whole * share))
    counts = [histogram_event(noise) for noise in noises[: len(before)]]
    drawn = event.sampling_rate * event.steps / DRAWN_PER_COUNTED
    histograms = list[TrainingEvent]()
    for noise in noises[len(before) :]:
        rate = min(1.0, max(drawn, LEAST_OVER_NOISE * noise / records))
        histograms.append(histogram_event(noise, rate))
    return tuple(counts), tuple(histograms)


def calibrated(
    settings: Settings, event: TrainingEvent, earlier: tuple[TrainingEvent, ...] = ()
) -> TrainingEvent:
    """Return an event with the least noise for which the whole run costs at most its epsilon.

    An event whose noise was given is unchanged.

    Args:
        settings: completed settings.
        event: all steps of the run.
        earlier: events on the same records, and others that are planned, which the target covers.

    Raises:
        BudgetError: no noise meets epsilon.
    """
    if settings.no_dp or settings.epsilon is None:
        return event
    sigma = calibrate_noise(event, settings.delta, settings.epsilon, earlier=earlier)
    return replace(event, noise_multiplier=sigma)
