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
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import LEAST_NOISE, TrainingEvent
from dpmac_cli.accounting.pricing import Row, accountant_note, price
from dpmac_cli.config.checks import delta_note, misfits
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.fields import Choice, Flag, Several, flag_name
from dpmac_cli.config.named import RECIPES
from dpmac_cli.config.recipes import recipe_notes
from dpmac_cli.config.settings import (
    OWN_DATA,
    PRIVACY,
    TASK,
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

    dataset_size: Annotated[Count | None, Flag(TASK)] = None
    """Number of training records n, for data that dpmac does not have."""
    epochs: Annotated[Several[Length] | None, Flag(TASK, otherwise="the dataset's")] = None
    """Epochs of ceil(n/B) steps."""
    steps: Annotated[Several[Length] | None, Flag(TASK)] = None
    """Steps, instead of --epochs."""
    sigma: Annotated[Several[NoiseOrNone] | None, Flag(PRIVACY)] = None
    """Noise multiplier."""
    epsilon: Annotated[Several[Positive] | None, Flag(PRIVACY)] = None
    """Target epsilon: solve for a setting that meets it."""
    accountant: Annotated[str, Choice(tuple(USED)), Flag(PRIVACY)] = DEFAULT_ACCOUNTANT
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
        if (name := given.get("recipe")) in RECIPES:
            yield f"--recipe {name} is a file of settings. Use paper or best, and its settings."
        if (own := given.get("dataset", "mnist")) not in DATASETS and OWN_DATA[0](str(own)):
            yield f"--dataset: use one of {', '.join(DATASETS)}; for your own data --dataset-size."
        if "epsilon" in given and "sigma" in given:
            if "0" in str(given["sigma"]).split(","):
                yield "--sigma 0 adds no noise, so epsilon is infinite: nothing can be solved for."
            for name in ("epochs", "steps"):
                if name in given:
                    yield (
                        f"--sigma, --epsilon and --{name} together leave nothing to solve for: "
                        "leave one out."
                    )

    @property
    def solve(self) -> str | None:
        """Return the setting to solve for; None for epsilon."""
        if self.epsilon is None:
            return None
        return "sigma" if self.sigma is None else "steps"

    @property
    def run(self) -> Settings | None:
        """Return the settings of the run, as ``dpmac train`` has them; None without a dataset."""
        if self.dataset_size is not None and "dataset" not in self.explicit:
            return None
        shared = {n: v for n, v in self.explicit.items() if n in Priced.model_fields}
        lengths = {
            name: (of[0] if of and of[0] else None)
            for name, of in (("epochs", self.epochs), ("steps", self.steps))
        }
        targets = self.epsilon or ()
        noise = {"epsilon": targets[0]} if self.solve == "sigma" else {"sigma": 1.0}
        return Settings.model_validate({**shared, **lengths, **noise})

    @property
    def notes(self) -> tuple[str, ...]:
        """Return notes on what the recipe of the run chose."""
        run = self.run
        return () if run is None else tuple(recipe_notes(run, DATASETS[str(self.dataset)]))

    def completed(self) -> Self:
        """Return this question with the sizes of its dataset and recipe. Raises InputError."""
        run, changes = self.run, dict[str, Any]()
        if run is not None:
            facts = DATASETS[str(self.dataset)]
            found = completed(run, facts)
            changes = {"dataset_size": facts.train_size, "batch_size": found.batch_size}
            if self.epochs is None and self.steps is None and self.solve != "steps":
                changes["epochs"] = (found.epochs,)
        asked = self.model_copy(update=changes)
        errors = [
            f"--sigma must be 0 for no noise, or at least {SIGMA_MIN:g}, not {sigma:g}."
            for sigma in self.sigma or ()
            if 0 < sigma < SIGMA_MIN
        ]
        if missing := [*_missing(asked)]:
            them = "it" if len(missing) == 1 else "them"
            errors.append(f"Add {', and '.join(missing)}: without {them} there is no answer.")
        elif asked.dataset_size is not None:
            sizes = asked.dataset_size, asked.batch_size
            errors += misfits("the dataset", *sizes, asked.epochs or ())
        raise_errors(errors)
        return asked


def _missing(asked: Question) -> Iterator[str]:
    """Yield flags without which there is no answer."""
    if asked.solve is None and asked.sigma is None:
        yield "--sigma (to compute epsilon) or --epsilon (to compute sigma)"
    if not asked.batch_size:
        yield "--batch-size"
    if asked.epochs is None and asked.steps is None and asked.solve != "steps":
        yield "--epochs or --steps"


def by_target(asked: Question) -> tuple[Question, ...]:
    """Return a question for each target epsilon whose recipe may differ."""
    targets = asked.epsilon or ()
    if not asked.notes or len(targets) < 2:
        return (asked,)
    return tuple(asked.model_copy(update={"epsilon": (one,)}) for one in targets)


def answer(*completed_questions: Question) -> Iterator[Row]:
    """Yield the rows that answer questions, one for each combination of the values of each.

    Raises:
        BudgetError: after all rows that can be computed, if some targets cannot be met.
    """
    out_of_reach: dict[str, None] = {}
    for question in completed_questions:
        lengths = {"epochs": question.epochs, "steps": question.steps}
        counts = [(unit, count) for unit, counts in lengths.items() for count in counts or ()]
        for case in itertools.product(
            question.sigma or (0.0,),
            counts or [("steps", 1)],
            question.epsilon or (0.0,),
            USED[question.accountant],
        ):
            try:
                yield _solved(question, *case)
            except BudgetError as failure:
                out_of_reach[str(failure)] = None
    if out_of_reach:
        raise BudgetError("\n".join(out_of_reach))


def _solved(
    question: Question, sigma: float, length: tuple[str, int], target: float, accountant: str
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
    events = [event for row in rows for event in row.events]
    for delta, size in dict.fromkeys((row.delta, row.dataset_size) for row in rows):
        if size is not None:
            yield from delta_note(delta, size)
    if DEFAULT_ACCOUNTANT in USED[accountant]:
        by_rdp = (accountant_note(row.events, row.delta) for row in rows)
        yield from dict.fromkeys(itertools.chain.from_iterable(by_rdp))
    allocated = [e for e in events if e.sampling.once_an_epoch and e.sampling.amplified]
    if any(0 < e.noise_multiplier < LEAST_NOISE for e in allocated):
        yield (
            f"Below noise multiplier {LEAST_NOISE:g} random allocation is accounted without "
            "amplification: an epoch costs as much as a step on all records. Poisson sampling may "
            "cost less (--sampler poisson)."
        )
    if any(row.solved == "steps" and row.steps == MOST_STEPS for row in rows):
        yield f"{MOST_STEPS:,} steps is the maximum of a run; the budget would allow more."
