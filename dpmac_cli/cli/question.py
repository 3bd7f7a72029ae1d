"""Question of dpmac account: sizes and noise of a training, or a target to solve for.

No records are read: the sizes are public, those of a registered dataset or of the flags.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import StrictBool

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.accountants import ACCOUNTANTS, DEFAULT_ACCOUNTANT
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.accounting.pricing import Row, price
from dpmac_cli.config.checks import misfits
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.defaults import completed, recipe_notes
from dpmac_cli.config.flags import OneOf, Several, SomePath, lonely
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.plan import (
    MOMENTS,
    ROUNDS,
    ROUNDS_OF_TARGET,
    SHARE,
    Shares,
    histograms_of,
    shares_of_counts,
)
from dpmac_cli.config.settings import (
    HISTOGRAM,
    LATER,
    Count,
    Debug,
    Length,
    NoiseMultiplier,
    Positive,
    Priced,
    PrintJson,
    Settings,
)
from dpmac_cli.errors import BudgetError, InputError, raise_errors

#: Accountants to use, by the value of ``--accountant``.
USED = {**{name: (name,) for name in ACCOUNTANTS}, "all": tuple(ACCOUNTANTS)}


class Question(Priced, frozen=True):
    """Flags of ``dpmac account``: sizes and noise of a training, a target, and what is printed.

    What is not given is completed by the defaults of the dataset, or is solved for (:attr:`solve`).
    :func:`answer` computes the privacy costs. Values are validated when an instance is made, as
    text or of their types: ``Question(sigma="0.5,1", epochs=5)``.

    Raises:
        InputError: lists every invalid value and contradiction.
    """

    dataset: Annotated[str, OneOf(DATASETS)] = "mnist"
    """Dataset to train on; for your own data use --dataset-size."""
    recipe: Annotated[str, OneOf((PAPER, BEST))] = LATER
    """Values of sizes that are not given: of the run in the paper, or of the best run. [default:
    paper with --sigma, best otherwise]"""
    dataset_size: Count | None = None
    """Number of training records n, for data that dpmac does not have."""
    epochs: Several[Length] | None = None
    """Epochs of ceil(n/B) steps. [default: the dataset's]"""
    steps: Several[Length] | None = None
    """Steps, instead of --epochs."""
    sigma: Several[NoiseMultiplier] | None = None
    """Noise multiplier."""
    epsilon: Several[Positive] | None = None
    """Target epsilon: solve for a setting that meets it."""
    ranges: bool = False
    """Count the records before training, to find ranges of columns, at a tenth of the budget (of
    mu^2)."""
    target_range: bool = False
    """Count the numbers to predict before training, to find their range, at 8% of the budget."""
    accountant: Annotated[str, OneOf(USED)] = DEFAULT_ACCOUNTANT
    """Accounting method."""
    risk: StrictBool = False
    """Also show bounds on what an attacker can learn."""
    plot: SomePath | None = None
    """Draw the trade-off curve of --risk (.png, .svg or .pdf). An existing file is replaced."""
    json: PrintJson = False  # type: ignore[assignment]
    debug: Debug = False
    not_both = MappingProxyType({("epochs", "steps"): "", ("dataset", "dataset_size"): ""})

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude or need each other; nothing if there are none.

        Args:
            values: the flags that were typed, by name with underscores ("dataset_size").
        """
        yield from super().contradictions(values)
        own_data = "dataset_size" in values and "dataset" not in values
        if own_data:
            for name in ("recipe", "model"):
                if name in values:
                    yield f"--{name} needs --dataset."
        lengths = values.keys() & {"epochs", "steps"}
        both_given = {"epsilon", "sigma"} <= values.keys()
        if both_given:
            for name in lengths:
                yield (
                    f"--sigma, --epsilon and --{name} together leave nothing to solve for: leave "
                    "one out."
                )
        complete = "batch_size" in values and (lengths or both_given)
        if own_data and not complete:
            yield "Add --batch-size, and --epochs or --steps, to --dataset-size."
        yield from lonely(values, {"plot": ("risk",)})
        if "risk" in values and values.get("accountant") in ("rdp", "all"):
            yield "--risk needs privacy loss distributions: add --accountant pld."

    @property
    def solve(self) -> str | None:
        """Return the setting to solve for, "sigma" or "steps"; None to compute epsilon.

        Noise is solved for if a target epsilon is given without noise, the length if both are
        given.
        """
        if self.epsilon is None:
            return None
        return "sigma" if self.sigma is None else "steps"

    @property
    def _calibrates(self) -> bool:
        """Return whether a run on your own data releases a histogram, as ``dpmac train`` does."""
        if "calibration" in self.explicit:
            return self.calibration == HISTOGRAM
        return self.solve == "sigma"

    def sizes(self, target: float | None) -> "Sizes":
        """Return the sizes of a run, of which those not given are the defaults of its dataset.

        Args:
            target: epsilon that the run keeps to, by which the best recipe chooses; None if the
                noise is given.

        Raises:
            InputError: the batch or the epochs do not fit the number of records.
        """
        size, batch, epochs = self.dataset_size, self.batch_size, self.epochs
        notes = tuple[str, ...]()
        before: tuple[float, ...] = ROUNDS if self.ranges else ()
        if self.target_range:
            before = (*before, *ROUNDS_OF_TARGET, MOMENTS)
        after: tuple[float, ...] = (SHARE,) if self._calibrates else ()
        if size is None:
            facts = DATASETS[self.dataset]
            settings = self._settings(target)
            run, notes = completed(settings, facts), tuple(recipe_notes(settings, facts))
            size, batch = facts.train_size, run.batch_size
            _, after = shares_of_counts(run, facts)
            no_length = not self.epochs and not self.steps and self.solve != "steps"
            if no_length and run.epochs is not None:
                epochs = (run.epochs,)
        raise_errors(misfits("the dataset", size, batch, epochs or ()))
        steps_per_epoch = math.ceil(size / batch)
        lengths = [count * steps_per_epoch for count in epochs or ()]
        lengths += self.steps or ()
        return Sizes(size, batch, tuple(lengths) or (1,), notes, (before, after))

    def _settings(self, target: float | None) -> Settings:
        """Return the settings of a run on the dataset, as they were typed."""
        values = {name: self.explicit.get(name) for name in Priced.model_fields}
        for name, lengths in (("epochs", self.epochs), ("steps", self.steps)):
            if lengths:
                values[name] = lengths[0] or None
        if self.solve == "sigma":
            values["epsilon"] = target
        else:
            values["sigma"] = 1.0  # the sizes do not depend on it
        return Settings.model_validate(values)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run, of which every length is a training of its own.

    Attributes:
        records: number of training records n.
        batch: expected batch size B.
        lengths: numbers of steps; (1,) if they are solved for.
        notes: notes on the recipe that they are from; () for your own data.
        shares: shares of the budget that histograms of the training records have: of those before
            the first step and of those after the last one; () for none.
    """

    records: int
    batch: int
    lengths: tuple[int, ...]
    notes: tuple[str, ...]
    shares: Shares


def answer(question: Question) -> tuple[list[Row], tuple[str, ...], list[str]]:
    """Compute the privacy cost of every combination of values.

    Combinations are of targets, noise multipliers, numbers of steps and accountants, in that order
    of loops. A combination whose target cannot be met has no row.

    Args:
        question: the flags.

    Returns:
        A row for each combination; notes for the user; and why some targets cannot be met, one
        message per reason, empty if all can.

    Raises:
        InputError: neither noise nor a target is given, or the sizes do not fit each other.
    """
    if question.sigma is None and question.epsilon is None:
        raise InputError("Add --sigma to compute epsilon, or --epsilon to compute sigma.")
    rows, notes, beyond = list[Row](), dict[str, None](), dict[str, None]()
    for target in question.epsilon or (None,):
        sizes = question.sizes(target)
        size, batch = sizes.records, sizes.batch
        notes |= dict.fromkeys(sizes.notes)
        for sigma, steps, accountant in itertools.product(
            question.sigma or (0.0,), sizes.lengths, USED[question.accountant]
        ):
            event = TrainingEvent(
                batch / size,
                sigma,
                steps,
                question.sampler,
                math.ceil(size / batch),
                overflow=overflow_of(question.delta),
            )
            ranges, histogram = histograms_of(target, question.delta, event, sizes.shares, size)
            others = (*ranges, *histogram)
            try:
                event = _solved(event, question, target or 0.0, accountant, others)
            except BudgetError as failure:
                beyond |= dict.fromkeys(failure.errors)
                continue
            row = price((event, *others), question.delta, accountant)
            rows.append(replace(row, dataset_size=size, batch_size=batch, solved=question.solve))
    return rows, tuple(notes), [*beyond]


def _solved(
    event: TrainingEvent,
    question: Question,
    target: float,
    accountant: str,
    others: tuple[TrainingEvent, ...],
) -> TrainingEvent:
    """Return an event with what is solved for.

    Args:
        event: steps of the training, whose noise or number is to be replaced.
        question: says what is solved for, if anything.
        target: epsilon that event and ``others`` keep to together.
        accountant: name of the accountant.
        others: further events on the same records, such as histograms.

    Raises:
        BudgetError: nothing meets the target.
    """
    goal = (event, question.delta, target, accountant)
    match question.solve:
        case "sigma":
            return replace(event, noise_multiplier=calibration.calibrate_noise(*goal, others))
        case "steps":
            return replace(event, steps=calibration.longest_run(*goal, others))
    return event
