"""Questions to ``dpmac account``: its flags checked, and the rows that answer them."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.accountants import ACCOUNTANTS, SIGMA_MAX, SIGMA_MIN
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row, best_of, price
from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.config.checks import delta_note
from dpmac_cli.config.given import near
from dpmac_cli.config.settings import flag_name
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import BudgetError, InputError

DEFAULT_DATASET, DEFAULT_DELTA = "mnist", 1e-5
MOST_ROWS = 1000
#: Flags that each answer is worked out from, and those that must be left out for it.
NEEDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sigma": (("epsilon",), ("sigma",)),
    "steps": (("sigma", "epsilon"), ("epochs", "steps")),
    "batch-size": (("sigma", "epsilon"), ("batch-size",)),
    "delta": (("sigma", "epsilon"), ("delta",)),
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dataset": tuple(DATASETS),
    "sampler": tuple(SAMPLERS),
    "accountant": (*ACCOUNTANTS, "all"),
    "solve": tuple(NEEDS),
}
#: Bounds of numbers in words.
BOUNDS: Mapping[str, str] = {
    "sigma": f"at least 0 and at most {SIGMA_MAX:g} (0 for no noise, or at least {SIGMA_MIN:g})",
    **dict.fromkeys(("epochs", "steps"), f"at least 0 and at most {MOST_STEPS:,}"),
    **dict.fromkeys(("dataset-size", "batch-size"), "at least 1 and at most 1,000,000,000"),
    "epsilon": "above 0",
    "delta": "above 0 and below 1",
    "runs": "at least 2 and at most 10,000",
}
Several = BeforeValidator(lambda text: text.split(","))
Sigma = Annotated[float, Field(ge=SIGMA_MIN, le=SIGMA_MAX)] | Annotated[float, Field(ge=0, le=0)]
Length = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Positive = Annotated[float, Field(gt=0)]


class Flags(BaseModel):
    """Flags of ``dpmac account``, each checked by itself."""

    model_config = ConfigDict(alias_generator=flag_name, allow_inf_nan=False, defer_build=True)

    dataset: Literal[tuple(DATASETS)] = DEFAULT_DATASET  # type: ignore[valid-type]
    sampler: Literal[tuple(SAMPLERS)] = "poisson"  # type: ignore[valid-type]
    accountant: Literal[(*ACCOUNTANTS, "all")] | None = None  # type: ignore[valid-type]
    solve: Literal[tuple(NEEDS)] | None = None  # type: ignore[valid-type]
    sigma: Annotated[tuple[Sigma, ...], Several] = ()
    epochs: Annotated[tuple[Length, ...], Several] = ()
    steps: Annotated[tuple[Length, ...], Several] = ()
    epsilon: Annotated[tuple[Positive, ...], Several] = ()
    delta: float = Field(DEFAULT_DELTA, gt=0, lt=1)
    dataset_size: int = Field(0, ge=1, le=10**9)
    batch_size: int = Field(0, ge=1, le=10**9)
    runs: int = Field(1, ge=2, le=10_000)


def parse(given: Mapping[str, str], errors: list[str]) -> Flags:
    """Return the flags that are valid; what is wrong with the others joins ``errors``."""
    try:
        return Flags.model_validate(given)
    except ValidationError as failure:
        faults = failure.errors()
    named = [(str(fault["loc"][0]), fault) for fault in faults]
    errors += dict.fromkeys(_message(name, fault["type"], fault["input"]) for name, fault in named)
    return Flags.model_validate({name: given[name] for name in given.keys() - dict(named).keys()})


def _message(name: str, fault: str, text: str) -> str:
    """Return what is wrong with a value, from the type of pydantic's error."""
    if name in CHOICES:
        hint, known = near(text, CHOICES[name]), ", ".join(CHOICES[name])
        return f"--{name}: there is no {name} '{text}'.{hint} Known: {known}."
    if fault.startswith(("greater", "less")):
        return f"--{name} must be {BOUNDS[name]}, not {text}."
    return f"--{name}: '{text}' is not {'a whole' if fault.startswith('int') else 'a'} number."


@dataclass(frozen=True, kw_only=True)
class Question:
    """A cost to compute, or a setting to work out for a target; that setting is 0 or empty.

    Attributes:
        dataset_size, batch_size: n, B. sigmas: noise multipliers. epsilons: targets.
        lengths: of training, ("epochs", 5) or ("steps", 1000).
        solve: the setting, a key of :data:`NEEDS`; None for epsilon.
        accountants: that answer. runs: trainings of which the best is published.
    """

    dataset_size: int
    batch_size: int
    sigmas: tuple[float, ...] = ()
    lengths: tuple[tuple[str, int], ...] = ()
    epsilons: tuple[float, ...] = ()
    delta: float = DEFAULT_DELTA
    solve: str | None = None
    sampler: str = "poisson"
    accountants: tuple[str, ...] = ("pld",)
    runs: int = 1


def ask(given: Mapping[str, str], found: Sequence[str] = ()) -> Question:
    """Turn what was typed into one checked question.

    Args:
        given: text by flag name ("batch-size").
        found: faults that were found before.

    Raises:
        InputError: with every fault found.
    """
    errors = list(found)
    typed = parse(given, errors)
    solve = given.get("solve")
    if solve is None and "epsilon" in given:
        solve = "steps" if "sigma" in given else "sigma"
    errors += _faults_of_solving(given, solve)
    size, batch = typed.dataset_size, typed.batch_size
    lengths = [("epochs", n) for n in typed.epochs] + [("steps", n) for n in typed.steps]
    facts = DATASETS.get(given.get("dataset", "" if "dataset-size" in given else DEFAULT_DATASET))
    if facts is not None:
        size = facts.train_size
        if not batch and solve != "batch-size":
            batch = facts.defaults.batch_size
        if not lengths and solve != "steps":
            lengths = [("epochs", facts.defaults.epochs)]
    if size and batch:
        errors += _misfits(size, batch, typed.epochs)
    accountants = accountants_for(typed.sampler, typed.accountant)
    offered = SAMPLERS[typed.sampler].accountants
    if not {*accountants} <= {*offered}:
        able = f"cannot price {typed.sampler} sampling; {' or '.join(offered)} can."
        errors.append(f"--accountant {typed.accountant} {able}")
    several = (typed.sigma, lengths, typed.epsilon, accountants)
    rows = math.prod(len(values) for values in several if values)
    if rows > MOST_ROWS:
        errors.append(f"{rows:,} prices; a table has at most {MOST_ROWS:,}. Give fewer values.")
    if errors:
        raise InputError(errors)
    return Question(
        dataset_size=size,
        batch_size=batch,
        sigmas=typed.sigma,
        lengths=tuple(lengths),
        epsilons=typed.epsilon,
        delta=0.0 if solve == "delta" else typed.delta,
        solve=solve,
        sampler=typed.sampler,
        accountants=accountants,
        runs=typed.runs,
    )


def _faults_of_solving(given: Mapping[str, str], solve: str | None) -> Iterator[str]:
    """Yield what contradicts the answer that is asked for, and what is missing for it."""
    for one, other in (("epochs", "steps"), ("dataset", "dataset-size")):
        if one in given and other in given:
            yield f"--{one} and --{other} contradict each other: give one."
    if solve not in (None, *NEEDS):
        return
    needed, left_open = NEEDS[solve] if solve else (("sigma",), ())
    for name in left_open:
        if name in given and "solve" in given:
            yield f"--{name} leaves nothing open for --solve {solve}: leave it out."
        elif name in given:
            yield (
                f"--sigma, --epsilon and --{name} together leave nothing open: leave one out, "
                "or add --solve delta or --solve batch-size."
            )
    missing = [f"--{name}" for name in needed if name not in given]
    if solve is None and missing:
        missing = ["--sigma (to price it) or --epsilon (to work out the noise for it)"]
    if "dataset-size" in given and "dataset" not in given:  # a data set brings these
        if "batch-size" not in given and solve != "batch-size":
            missing.append("--batch-size")
        if not {"epochs", "steps"} & given.keys() and solve != "steps":
            missing.append("--epochs or --steps")
    if missing:
        them = "it" if len(missing) == 1 else "them"
        yield f"Add {', and '.join(missing)}: without {them} there is no answer."


def _misfits(size: int, batch: int, lengths: Sequence[int]) -> Iterator[str]:
    """Yield what is wrong between the data set's size, a batch size, and epochs."""
    if batch > size:
        yield f"--batch-size ({batch}) must not be above the data set's size, {size}."
    for epochs in lengths:
        steps = epochs * math.ceil(size / batch)
        if steps > MOST_STEPS:
            yield (
                f"--epochs {epochs} is {steps:,} steps in all; a run takes at most "
                f"{MOST_STEPS:,}. Choose fewer epochs or larger batches."
            )


def accountants_for(sampler: str, wanted: str | None) -> tuple[str, ...]:
    """Return the accountants that answer, given the one that is wanted, or "all"."""
    offered = SAMPLERS[sampler].accountants
    return offered if wanted == "all" else (wanted or offered[0],)


def answer(question: Question) -> Iterator[Row]:
    """Yield the rows that answer a question, one for each combination of its values.

    Raises:
        BudgetError: after all that can be answered, if some targets are out of reach.
    """
    out_of_reach: dict[str, None] = {}
    for sigma, length, target in itertools.product(
        question.sigmas or (0.0,), question.lengths or (("steps", 1),), question.epsilons or (0.0,)
    ):
        rows = []
        for accountant in question.accountants:
            try:
                rows.append(_solved(question, sigma, length, target, accountant))
            except BudgetError as failure:
                out_of_reach[str(failure)] = None
        yield from best_of(rows, question.runs)
    if out_of_reach:
        raise BudgetError("\n".join(out_of_reach))


def _solved(
    question: Question, sigma: float, length: tuple[str, int], target: float, accountant: str
) -> Row:
    """Work out what is asked for, and price it forward."""

    def event_of(batch: int) -> TrainingEvent:
        unit, count = length
        per_epoch = math.ceil(question.dataset_size / batch)
        steps = count * per_epoch if unit == "epochs" else count
        rate = batch / question.dataset_size
        return TrainingEvent(rate, sigma, steps, question.sampler, per_epoch)

    batch, delta, known = question.batch_size, question.delta, None
    if question.solve == "batch-size":
        batch = calibration.largest_batch(
            event_of, question.dataset_size, delta, target, accountant
        )
    event = event_of(batch)
    if question.solve == "sigma":
        event = replace(
            event, noise_multiplier=calibration.calibrate_noise(event, delta, target, accountant)
        )
    elif question.solve == "steps":
        event = replace(event, steps=calibration.longest_run(event, delta, target, accountant))
    elif question.solve == "delta":
        delta, known = calibration.least_delta((event,), target, accountant), target
    row = price((event,), delta, accountant, known)
    return replace(row, dataset_size=question.dataset_size, batch_size=batch, solved=question.solve)


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what is legal, but probably not what was meant."""
    for delta, size in dict.fromkeys((row.delta, row.dataset_size) for row in rows):
        if size is not None:
            yield from delta_note(delta, size)
    if any(row.solved == "steps" and row.steps == MOST_STEPS for row in rows):
        yield f"{MOST_STEPS:,} steps are as many as a run may have; the budget would pay for more."
