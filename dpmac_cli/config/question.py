"""Flags of ``dpmac account``: validation, and the rows that answer them."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.accountants import ACCOUNTANTS, DEFAULT_ACCOUNTANT, SIGMA_MIN
from dpmac_cli.accounting.calibration import MOST_STEPS
from dpmac_cli.accounting.events import ALIASES, LEAST_NOISE, SAMPLERS, TrainingEvent
from dpmac_cli.accounting.pricing import Row, accountant_note, price
from dpmac_cli.config.checks import delta_note, misfits
from dpmac_cli.config.given import Given, validated
from dpmac_cli.config.settings import read_table
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import BudgetError, raise_errors

#: Settings to solve for, with the flags that must be left out.
SOLVABLE = {"sigma": ("sigma",), "steps": ("epochs", "steps"), "batch-size": ("batch-size",)}
#: Accountants to use, by the value of ``--accountant``.
USED = {**{name: (name,) for name in ACCOUNTANTS}, "all": tuple(ACCOUNTANTS)}
FLAGS = read_table(
    "account.toml",
    {
        "dataset": {"choices": tuple(DATASETS)},
        "solve": {"choices": tuple(SOLVABLE)},
        "sampler": {"choices": tuple(SAMPLERS), "renamed": ALIASES},
        "accountant": {"choices": tuple(USED)},
    },
)
DEFAULTS = {name: flag.default for name, flag in FLAGS.items()}


@dataclass(frozen=True, kw_only=True)
class Question:
    """Flags of ``dpmac account`` with their defaults; None for the setting to solve for."""

    dataset_size: int
    batch_size: int | None = None
    epochs: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    sigma: tuple[float, ...] | None = None
    epsilon: tuple[float, ...] | None = None
    solve: str | None = None
    delta: float
    sampler: str
    accountant: str

    @property
    def lengths(self) -> list[tuple[str, int]]:
        """Lengths of training, such as ("epochs", 5) or ("steps", 1000)."""
        units = {"epochs": self.epochs, "steps": self.steps}
        return [(unit, count) for unit, counts in units.items() for count in counts or ()]


def parse(given: Mapping[str, str], errors: list[str]) -> dict[str, Any]:
    """Return the valid flags, and add the faults of the others to ``errors``."""
    typed = {name.replace("-", "_"): Given(text, f"--{name}") for name, text in given.items()}
    return validated(typed, errors, FLAGS)


def ask(given: Mapping[str, str], found: Sequence[str] = ()) -> Question:
    """Convert text by flag name ("batch-size") to a validated question.

    Raises InputError with every fault, including those ``found`` before.
    """
    errors = list(found)
    typed = parse(given, errors)
    solve = given.get("solve")
    if solve is None and "epsilon" in given:
        solve = "steps" if "sigma" in given else "sigma"
    errors += _faults_of_solving(given, solve)
    errors += [
        f"--sigma must be 0 for no noise, or at least {SIGMA_MIN:g}, not {sigma:g}."
        for sigma in typed.get("sigma", ())
        if 0 < sigma < SIGMA_MIN
    ]
    default = "" if "dataset-size" in given else DEFAULTS["dataset"]
    facts = DATASETS.get(given.get("dataset", default))
    if facts is not None:
        typed["dataset_size"] = facts.train_size
        if solve != "batch-size":
            typed.setdefault("batch_size", facts.defaults.batch_size)
        if solve != "steps" and not typed.keys() & {"epochs", "steps"}:
            typed["epochs"] = (facts.defaults.epochs,)
    if typed.keys() >= {"dataset_size", "batch_size"}:
        errors += misfits(
            "the dataset", typed["dataset_size"], typed["batch_size"], typed.get("epochs", ())
        )
    raise_errors(errors)
    asked = {**DEFAULTS, **typed, "solve": solve}
    del asked["dataset"]
    return Question(**asked)


def _faults_of_solving(given: Mapping[str, str], solve: str | None) -> Iterator[str]:
    """Yield settings that contradict the requested answer, or are missing for it."""
    for one, other in (("epochs", "steps"), ("dataset", "dataset-size")):
        if one in given and other in given:
            yield f"--{one} and --{other} contradict each other: give one."
    if solve not in (None, *SOLVABLE):
        return
    if solve and "0" in given.get("sigma", "").split(","):
        yield "--sigma 0 adds no noise, so its epsilon is infinite: nothing can be solved for."
    for name in SOLVABLE[solve] if solve else ():
        if name in given and "solve" in given:
            yield f"--{name} leaves nothing to solve for with --solve {solve}: leave it out."
        elif name in given:
            yield (
                f"--sigma, --epsilon and --{name} together leave nothing to solve for: leave one "
                "out, or add --solve batch-size."
            )
    missing = [f"--{name}" for name in ("sigma", "epsilon") if name not in (*given, solve)]
    if solve is None:
        either = "--sigma (to compute epsilon) or --epsilon (to compute sigma)"
        missing = [] if "sigma" in given else [either]
    if "dataset-size" in given and "dataset" not in given:  # a dataset has defaults for these
        if "batch-size" not in given and solve != "batch-size":
            missing.append("--batch-size")
        if not {"epochs", "steps"} & given.keys() and solve != "steps":
            missing.append("--epochs or --steps")
    if missing:
        them = "it" if len(missing) == 1 else "them"
        yield f"Add {', and '.join(missing)}: without {them} there is no answer."


def answer(question: Question) -> Iterator[Row]:
    """Yield the rows that answer a question, one for each combination of its values.

    Raises:
        BudgetError: after all rows that can be computed, if some targets cannot be met.
    """
    out_of_reach: dict[str, None] = {}
    for case in itertools.product(
        question.sigma or (0.0,),
        question.lengths or (("steps", 1),),
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
    size, batch, delta = question.dataset_size, question.batch_size or 0, question.delta

    def event_of(batch: int) -> TrainingEvent:
        unit, count = length
        per_epoch = math.ceil(size / batch)
        steps = count * per_epoch if unit == "epochs" else count
        return TrainingEvent(batch / size, sigma, steps, question.sampler, per_epoch)

    if question.solve == "batch-size":
        batch = calibration.largest_batch(event_of, size, delta, target, accountant)
    event = event_of(batch)
    if question.solve == "sigma":
        sigma = calibration.calibrate_noise(event, delta, target, accountant)
        event = replace(event, noise_multiplier=sigma)
    elif question.solve == "steps":
        event = replace(event, steps=calibration.longest_run(event, delta, target, accountant))
    row = price((event,), delta, accountant)
    return replace(row, dataset_size=size, batch_size=batch, solved=question.solve)


def notes(rows: Sequence[Row], accountant: str = DEFAULT_ACCOUNTANT) -> Iterator[str]:
    """Yield what is legal, but probably not what was meant; ``accountant`` was asked for."""
    events = [event for row in rows for event in row.events]
    for delta, size in dict.fromkeys((row.delta, row.dataset_size) for row in rows):
        if size is not None:
            yield from delta_note(delta, size)
    if DEFAULT_ACCOUNTANT in USED[accountant]:
        by_rdp = (accountant_note(row.events, row.delta) for row in rows)
        yield from dict.fromkeys(itertools.chain.from_iterable(by_rdp))
    if any(e.sampling.once_an_epoch and 0 < e.noise_multiplier < LEAST_NOISE for e in events):
        yield (
            f"Below noise multiplier {LEAST_NOISE:g} random allocation is accounted without "
            "amplification: an epoch costs as much as a step on all records. Poisson sampling may "
            "cost less (--sampler poisson)."
        )
    if any(row.solved == "steps" and row.steps == MOST_STEPS for row in rows):
        yield f"{MOST_STEPS:,} steps is the maximum of a run; the budget would allow more."
