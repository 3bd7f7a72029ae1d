"""Questions of ``dpmac account``: settings of a run with several values, and rows that answer them.

Without a target epsilon, the epsilon is asked for; with one, what is left out of noise and length.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.accountants import ACCOUNTANTS, DEFAULT_ACCOUNTANT, SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row, accountant_note, price
from dpmac_cli.config.best import recipe_notes
from dpmac_cli.config.checks import delta_note, misfits
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.flags import Choice, Several, flag_name
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.settings import (
    LATER,
    Count,
    Length,
    Positive,
    Priced,
    Settings,
)
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import BudgetError, raise_errors

#: Accountants to use, by the value of ``--accountant``.
USED = {**{name: (name,) for name in ACCOUNTANTS}, "all": tuple(ACCOUNTANTS)}
NoiseOrNone = Annotated[float, Field(ge=0, le=SIGMA_MAX)]


class Question(Priced, frozen=True):
    """Flags of ``dpmac account``: as given, or completed; None for what is to be solved for.

    Raises:
        InputError: lists every invalid value and contradiction.
    """

    dataset: Annotated[str, Choice(tuple(DATASETS))] = "mnist"
    """Dataset to train on; for your own data use --dataset-size."""
    recipe: Annotated[str, Choice((PAPER, BEST))] = LATER
    """Values of sizes that are not given: of the run in the paper, or of the best run. [default:
    paper with --sigma, best otherwise]"""
    dataset_size: Count | None = None
    """Number of training records n, for data that dpmac does not have."""
    epochs: Several[Length] | None = None
    """Epochs of ceil(n/B) steps. [default: the dataset's]"""
    steps: Several[Length] | None = None
    """Steps, instead of --epochs."""
    sigma: Several[NoiseOrNone] | None = None
    """Noise multiplier."""
    epsilon: Several[Positive] | None = None
    """Target epsilon: solve for a setting that meets it."""
    accountant: Annotated[str, Choice(tuple(USED))] = DEFAULT_ACCOUNTANT
    """Accounting method."""

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude each other."""
        for one, other in (("epochs", "steps"), ("dataset", "dataset_size")):
            if one in given and other in given:
                flags = f"--{flag_name(one)} and --{flag_name(other)}"
                yield f"{flags} contradict each other: give one."
        if "dataset_size" in given and "dataset" not in given:
            yield from (f"--{n} needs --dataset." for n in ("recipe", "model") if n in given)
        lengths = given.keys() & {"epochs", "steps"}
        if solved := {"epsilon", "sigma"} <= given.keys():
            if "0" in str(given["sigma"]).split(","):
                yield "--sigma 0 adds no noise, so epsilon is infinite: nothing can be solved for."
            for name in lengths:
                yield (
                    f"--sigma, --epsilon and --{name} together leave nothing to solve for: leave "
                    "one out."
                )
        alone = "dataset_size" in given and "dataset" not in given
        if alone and not ("batch_size" in given and (lengths or solved)):
            yield "Add --batch-size, and --epochs or --steps, to --dataset-size."

    @property
    def solve(self) -> str | None:
        """Return the setting to solve for; None for epsilon."""
        return None if self.epsilon is None else "sigma" if self.sigma is None else "steps"

    def completed(self, target: float | None) -> tuple[Self, tuple[str, ...]]:
        """Return this question with the sizes of its dataset and recipe, and notes on the recipe.

        Raises InputError.
        """
        asked, notes = self.model_copy(update={"epsilon": target and (target,)}), tuple[str, ...]()
        if self.dataset_size is None or "dataset" in self.explicit:
            facts = DATASETS[self.dataset]
            shared = {n: v for n, v in self.explicit.items() if n in Priced.model_fields}
            noise = {"epsilon": target} if self.solve == "sigma" else {"sigma": 1.0}
            lengths = {name: (of or (None,))[0] or None for name, of in self.lengths.items()}
            run = Settings.model_validate({**shared, **lengths, **noise})
            found = completed(run, facts)
            changes: dict[str, Any] = {
                "dataset_size": facts.train_size,
                "batch_size": found.batch_size,
            }
            if not any(self.lengths.values()) and self.solve != "steps":
                changes["epochs"] = (found.epochs,)
            asked, notes = asked.model_copy(update=changes), tuple(recipe_notes(run, facts))
        errors = [
            f"--sigma must be 0 for no noise, or at least {SIGMA_MIN:g}, not {sigma:g}."
            for sigma in self.sigma or ()
            if 0 < sigma < SIGMA_MIN
        ]
        if self.sigma is None and self.epsilon is None:
            errors.append("Add --sigma to compute epsilon, or --epsilon to compute sigma.")
        sizes = asked.dataset_size or 1, asked.batch_size
        raise_errors([*errors, *misfits("the dataset", *sizes, asked.epochs or ())])
        return asked, notes

    @property
    def lengths(self) -> Mapping[str, tuple[int, ...] | None]:
        """Return the given lengths of training, by unit."""
        return {"epochs": self.epochs, "steps": self.steps}


def answer(question: Question) -> tuple[list[Row], tuple[str, ...], list[str]]:
    """Return a row for each combination of values, notes, and why targets cannot be met.

    Raises InputError.
    """
    rows, notes, beyond = list[Row](), dict[str, None](), dict[str, None]()
    for target in question.epsilon or (None,):
        asked, said = question.completed(target)
        notes |= dict.fromkeys(said)
        lengths = [(unit, count) for unit, of in asked.lengths.items() for count in of or ()]
        for case in itertools.product(
            asked.sigma or (0.0,), lengths or [("steps", 1)], USED[asked.accountant]
        ):
            try:
                rows.append(_solved(asked, target or 0.0, *case))
            except BudgetError as failure:
                beyond[str(failure)] = None
    return rows, tuple(notes), [*beyond]


def _solved(
    question: Question, target: float, sigma: float, length: tuple[str, int], accountant: str
) -> Row:
    """Solve for a setting, and compute the privacy cost of the result."""
    size, batch, delta = question.dataset_size or 1, question.batch_size, question.delta
    unit, count = length
    per_epoch = math.ceil(size / batch)
    steps = count * per_epoch if unit == "epochs" else count
    event = TrainingEvent(batch / size, sigma, steps, question.sampler, per_epoch)
    if question.solve == "sigma":
        sigma = calibration.calibrate_noise(event, delta, target, accountant)
        event = replace(event, noise_multiplier=sigma)
    elif question.solve == "steps":
        event = replace(event, steps=calibration.longest_run(event, delta, target, accountant))
    row = price((event,), delta, accountant)
    return replace(row, dataset_size=size, batch_size=batch, solved=question.solve)


def account_notes(rows: Sequence[Row], accountant: str = DEFAULT_ACCOUNTANT) -> Iterator[str]:
    """Yield what is legal, but probably not what was meant; ``accountant`` was asked for."""
    for delta, size in dict.fromkeys((row.delta, row.dataset_size) for row in rows):
        if size is not None:
            yield from delta_note(delta, size)
    if DEFAULT_ACCOUNTANT in USED[accountant]:
        by_rdp = (accountant_note(row.events, row.delta) for row in rows)
        yield from dict.fromkeys(itertools.chain.from_iterable(by_rdp))
