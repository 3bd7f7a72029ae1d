"""The checked question of ``dpmac account``, and the rows that answer it."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.accounting.accountants import (
    ACCOUNTANTS,
    SIGMA_MAX,
    SIGMA_MIN,
)
from dpmac_cli.accounting.calibration import (
    MOST_STEPS,
    calibrate_noise,
    largest_batch,
    least_delta,
    longest_run,
)
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.pricing import Row, composition, price, selection
from dpmac_cli.accounting.samplers import SAMPLERS
from dpmac_cli.config.resolve import delta_note, near
from dpmac_cli.config.settings import COUNT, POSITIVE, PROBABILITY, Bounds
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import BudgetError, InputError

DEFAULT_DATASET, DEFAULT_DELTA = "mnist", 1e-5
MOST_ROWS = 1000
SOLVABLE = ("sigma", "steps", "batch-size", "delta")
#: How a number is read, its bounds, and whether several may be given with commas between.
NUMBERS: Mapping[str, tuple[type, Bounds, bool]] = {
    "sigma": (float, Bounds(0, SIGMA_MAX), True),
    "epochs": (int, Bounds(0, MOST_STEPS), True),
    "steps": (int, Bounds(0, MOST_STEPS), True),
    "epsilon": (float, POSITIVE, True),
    "delta": (float, PROBABILITY, False),
    "dataset-size": (int, COUNT, False),
    "batch-size": (int, COUNT, False),
    "runs": (int, Bounds(2, 10_000), False),
}
CHOICES: Mapping[str, tuple[str, ...]] = {
    "dataset": tuple(DATASETS),
    "sampler": tuple(SAMPLERS),
    "accountant": (*ACCOUNTANTS, "all"),
    "solve": SOLVABLE,
}


@dataclass(frozen=True)
class Question:
    """What is to be priced, or worked out.

    Attributes:
        dataset_size: n.
        batch_size: B; 0 when it is what is asked for.
        sigmas: noise multipliers; empty when they are what is asked for.
        lengths: of training, ("epochs", 5) or ("steps", 1000); empty when asked for.
        epsilons: targets; empty when they are what is asked for.
        delta: 0 when it is what is asked for.
        solve: what is asked for, one of :data:`SOLVABLE`; None for epsilon.
        sampler: how batches are drawn.
        accountants: that answer.
        runs: how many trainings the published one is the best of; 1 for none but it.
    """

    dataset_size: int
    batch_size: int
    sigmas: tuple[float, ...]
    lengths: tuple[tuple[str, int], ...]
    epsilons: tuple[float, ...]
    delta: float
    solve: str | None
    sampler: str
    accountants: tuple[str, ...]
    runs: int


def ask(flags: Mapping[str, str | None], found: Sequence[str] = ()) -> Question:
    """Turn what was typed into one checked question.

    Args:
        flags: text by flag name ("batch-size"); None where not given.
        found: faults that were found before.

    Raises:
        InputError: with every fault found.
    """
    errors = list(found)
    values = parse(flags, errors)
    solve = _what_to_solve(values, errors)
    named: str = values.get("dataset", "" if "dataset-size" in values else DEFAULT_DATASET)
    facts = DATASETS.get(named)
    missing = _missing(values, solve, named=bool(named))
    if missing:
        them = "it" if len(missing) == 1 else "them"
        errors.append(f"Add {', and '.join(missing)}: without {them} there is no answer.")
    sizes = values.get("dataset-size", ())
    batches = values.get("batch-size", ())
    lengths = [(unit, count) for unit in ("epochs", "steps") for count in values.get(unit, ())]
    if facts is not None:
        sizes = (facts.train_size,)
        if not batches and solve != "batch-size":
            batches = (facts.defaults.batch_size,)
        if not lengths and solve != "steps":
            lengths = [("epochs", facts.defaults.epochs)]
    errors += _misfits(sizes, batches, values.get("epochs", ()))
    sampler = values.get("sampler", "poisson")
    accountants = accountants_for(sampler, values.get("accountant"), errors)
    several = (values.get("sigma"), lengths, values.get("epsilon"), accountants)
    rows = math.prod(len(given) for given in several if given)
    if rows > MOST_ROWS:
        errors.append(f"{rows:,} prices; a table has at most {MOST_ROWS:,}. Give fewer values.")
    if errors:
        raise InputError(errors)
    (delta,) = values.get("delta", (0.0 if solve == "delta" else DEFAULT_DELTA,))
    (runs,) = values.get("runs", (1,))
    return Question(
        sizes[0],
        batches[0] if batches else 0,
        values.get("sigma", ()),
        tuple(lengths),
        values.get("epsilon", ()),
        delta,
        solve,
        sampler,
        accountants,
        runs,
    )


def parse(flags: Mapping[str, str | None], errors: list[str]) -> dict[str, Any]:
    """Names as text, and numbers as tuples, of what was given; faults are added to ``errors``."""
    return {
        name: _chosen(name, text, errors) if name in CHOICES else _numbers(name, text, errors)
        for name, text in flags.items()
        if text is not None
    }


def _chosen(name: str, text: str, errors: list[str]) -> str:
    if text not in CHOICES[name]:
        errors.append(
            f"--{name}: there is no {name} '{text}'.{near(text, CHOICES[name])} "
            f"Known: {', '.join(CHOICES[name])}."
        )
    return text


def _numbers(name: str, text: str, errors: list[str]) -> tuple[Any, ...]:
    kind, bounds, several = NUMBERS[name]
    parts = text.split(",") if several else [text]
    values = []
    for part in parts:
        try:
            value = kind(part)
            finite = math.isfinite(value)
        except (ValueError, OverflowError):
            value, finite = None, False
        if not finite:
            what = "a whole number" if kind is int else "a number"
            errors.append(f"--{name}: '{part}' is not {what}.")
        elif not bounds.holds(value) or (name == "sigma" and 0 < value < SIGMA_MIN):
            low = f" (0 for no noise, or at least {SIGMA_MIN:g})" if name == "sigma" else ""
            errors.append(f"--{name} must be {bounds}{low}, not {part}.")
        else:
            values.append(value)
    return tuple(values)


#: What each answer is worked out from, and what must be left open for it.
NEEDS: Mapping[str | None, tuple[tuple[str, ...], tuple[str, ...]]] = {
    None: (("sigma",), ("epsilon",)),
    "sigma": (("epsilon",), ("sigma",)),
    "steps": (("sigma", "epsilon"), ("epochs", "steps")),
    "batch-size": (("sigma", "epsilon"), ("batch-size",)),
    "delta": (("sigma", "epsilon"), ("delta",)),
}


def _what_to_solve(values: Mapping[str, Any], errors: list[str]) -> str | None:
    """What is asked for: said with --solve, or else the one thing that is left open."""
    for one, other in (("epochs", "steps"), ("dataset", "dataset-size")):
        if one in values and other in values:
            errors.append(f"--{one} and --{other} contradict each other: give one.")
    solve: str | None = values.get("solve")
    if solve is None and "epsilon" in values:
        solve = "steps" if "sigma" in values else "sigma"
        length = next((name for name in NEEDS["steps"][1] if name in values), None)
        if solve == "steps" and length:
            errors.append(
                f"--sigma, --epsilon and --{length} together leave nothing open: leave one out, "
                "or add --solve delta or --solve batch-size."
            )
            return None
    for name in NEEDS[solve][1] if solve in NEEDS else ():
        if name in values:
            errors.append(f"--{name} leaves nothing open for --solve {solve}: leave it out.")
    return solve


def _missing(values: Mapping[str, Any], solve: str | None, *, named: bool) -> list[str]:
    """Flags without which there is no answer. A ``named`` data set brings sizes and epochs."""
    if solve not in NEEDS:
        return []
    missing = [f"--{name}" for name in NEEDS[solve][0] if name not in values]
    if solve is None and missing:
        missing = ["--sigma (to price it) or --epsilon (to work out the noise for it)"]
    if not named and "batch-size" not in values and solve != "batch-size":
        missing.append("--batch-size")
    if not named and not {"epochs", "steps"} & set(values) and solve != "steps":
        missing.append("--epochs or --steps")
    return missing


def _misfits(sizes: Sequence[int], batches: Sequence[int], lengths: Sequence[int]) -> Iterator[str]:
    """What is wrong between the data set's size, a batch size, and epochs."""
    for size, batch in itertools.product(sizes, batches):
        if batch > size:
            yield f"--batch-size ({batch}) must not be above the data set's size, {size}."
        for epochs in lengths:
            steps = epochs * math.ceil(size / batch)
            if steps > MOST_STEPS:
                yield (
                    f"--epochs {epochs} is {steps:,} steps in all; a run takes at most "
                    f"{MOST_STEPS:,}. Choose fewer epochs or larger batches."
                )


def accountants_for(sampler: str, wanted: str | None, errors: list[str]) -> tuple[str, ...]:
    """The accountants that answer; faults are added to ``errors``."""
    if sampler not in SAMPLERS:
        return ()
    offered = SAMPLERS[sampler].accountants
    if wanted == "all":
        return offered
    if wanted in ACCOUNTANTS and wanted not in offered:
        errors.append(
            f"--accountant {wanted} cannot price {sampler} sampling; {' or '.join(offered)} can."
        )
    return (wanted or offered[0],)


def answer(question: Question) -> Iterator[Row]:
    """The rows that answer a question, one for each combination of its values.

    Raises:
        BudgetError: when all that can be answered is, if some targets are out of reach.
    """
    out_of_reach: dict[str, None] = {}
    for sigma, length, target, accountant in itertools.product(
        question.sigmas or (0.0,),
        question.lengths or (("steps", 1),),
        question.epsilons or (0.0,),
        question.accountants,
    ):
        try:
            row = _solved(question, sigma, length, target, accountant)
        except BudgetError as failure:
            out_of_reach[str(failure)] = None
            continue
        yield row
        if question.runs > 1:
            yield composition(row, question.runs)
            if accountant == question.accountants[-1]:  # by RDP, whichever accountant prices one
                yield selection(row, question.runs)
    if out_of_reach:
        raise BudgetError("\n".join(out_of_reach))


def _solved(
    question: Question, sigma: float, length: tuple[str, int], target: float, accountant: str
) -> Row:
    """One row: work out what is asked for, and price it forward."""

    def event_of(batch: int) -> TrainingEvent:
        unit, count = length
        per_epoch = math.ceil(question.dataset_size / batch)
        steps = count * per_epoch if unit == "epochs" else count
        rate = batch / question.dataset_size
        return TrainingEvent(rate, sigma, steps, question.sampler, per_epoch)

    batch, delta = question.batch_size, question.delta
    if question.solve == "batch-size":
        batch = largest_batch(event_of, question.dataset_size, delta, target, accountant)
    event = event_of(batch)
    if question.solve == "sigma":
        sigma = calibrate_noise(event, delta, target, accountant)
        event = replace(event, noise_multiplier=sigma)
    if question.solve == "steps":
        event = replace(event, steps=longest_run(event, delta, target, accountant))
    if question.solve == "delta":
        row = price((event,), least_delta((event,), target, accountant), accountant, target)
    else:
        row = price((event,), delta, accountant)
    return replace(row, dataset_size=question.dataset_size, batch_size=batch, solved=question.solve)


def notes(rows: Sequence[Row]) -> Iterator[str]:
    """What is legal, but probably not what was meant."""
    for delta, size in dict.fromkeys((row.delta, row.dataset_size) for row in rows):
        if size is not None:
            yield from delta_note(delta, size)
    if any(row.solved == "steps" and row.steps == MOST_STEPS for row in rows):
        yield f"{MOST_STEPS:,} steps are as many as a run may have; the budget would pay for more."
