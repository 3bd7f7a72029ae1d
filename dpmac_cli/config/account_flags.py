"""Flags of ``dpmac account``: validation, and the rows that answer them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from dpmac_cli.accounting.accountants import (
    ACCOUNTANTS,
    DEFAULT_ACCOUNTANT,
    SIGMA_MAX,
    SIGMA_MIN,
)
from dpmac_cli.accounting.events import ALIASES, SAMPLERS
from dpmac_cli.accounting.selection import Trials, trials_of
from dpmac_cli.config.checks import misfits
from dpmac_cli.config.defaults import completed
from dpmac_cli.config.fields import Choice, Flag, Option, Several, flag_name, options
from dpmac_cli.config.flags import Flags, unknown, valid_part
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.recipes import recipe_notes
from dpmac_cli.config.settings import (
    DELTA,
    Count,
    Length,
    MeanTrials,
    Positive,
    Probability,
    Settings,
)
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.errors import raise_errors
from dpmac_cli.models.registry import MODELS

#: What to solve for, with the flags that must be left out.
SOLVABLE: Mapping[str, tuple[str, ...]] = {"sigma": ("sigma",), "steps": ("epochs", "steps")}
#: Accountants to use, by the value of ``--accountant``.
USED = {**{name: (name,) for name in ACCOUNTANTS}, "all": tuple(ACCOUNTANTS)}
TRAINING, TARGET, METHOD = "Training", "Target", "Method"
NoiseOrNone = Annotated[float, Field(ge=0, le=SIGMA_MAX)]


class AccountFlags(Flags, frozen=True):
    """Flags of ``dpmac account``, as given."""

    dataset: Annotated[str, Choice(tuple(DATASETS)), Flag(TRAINING)] = "mnist"
    """Dataset."""
    recipe: Annotated[
        str | None,
        Choice((PAPER, BEST)),
        Flag(TRAINING, otherwise="best for the noise of an --epsilon, as in dpmac train"),
    ] = None
    """Recipe of the dataset that sets batch size and epochs."""
    model: Annotated[
        str | None,
        Choice(tuple(MODELS)),
        Flag(TRAINING, otherwise="the recipe's"),
    ] = None
    """Network of that recipe."""
    dataset_size: Annotated[
        Count | None,
        Flag(TRAINING),
    ] = None
    """Number of training records n, for data that dpmac does not have."""
    batch_size: Annotated[
        Count | None,
        Flag(TRAINING, otherwise="the dataset's"),
    ] = None
    """Expected batch size B."""
    epochs: Annotated[
        Several[Length] | None,
        Flag(TRAINING, otherwise="the dataset's"),
    ] = None
    """Epochs of ceil(n/B) steps."""
    steps: Annotated[
        Several[Length] | None,
        Flag(TRAINING),
    ] = None
    """Steps, instead of --epochs."""
    sigma: Annotated[
        Several[NoiseOrNone] | None,
        Flag(TRAINING),
    ] = None
    """Noise multiplier."""
    epsilon: Annotated[
        Several[Positive] | None,
        Flag(TARGET),
    ] = None
    """Target epsilon: solve for a setting that meets it."""
    delta: Annotated[Probability, Flag(TARGET)] = DELTA
    """Delta of (epsilon, delta)."""
    tune: Annotated[
        MeanTrials | None,
        Flag(TARGET),
    ] = None
    """Privacy cost of a search (dpmac tune) with this mean number of trials, each trained like
    this."""
    sampler: Annotated[
        str,
        Choice(tuple(SAMPLERS), renamed=ALIASES),
        Flag(METHOD),
    ] = "poisson"
    """Batch sampling method."""
    accountant: Annotated[str, Choice(tuple(USED)), Flag(METHOD)] = "pld"
    """Accounting method."""


FLAGS: Mapping[str, Option] = options(AccountFlags)


@dataclass(frozen=True, kw_only=True)
class AccountQuery:
    """Flags of ``dpmac account`` with their defaults; None for the setting to solve for.

    ``trials`` is the number of trials of a search, and ``said`` are notes on the recipe that the
    defaults are from.
    """

    dataset_size: int
    batch_size: int
    epochs: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    sigma: tuple[float, ...] | None = None
    epsilon: tuple[float, ...] | None = None
    solve: str | None = None
    delta: float
    sampler: str
    accountant: str
    trials: Trials | None = None
    said: tuple[str, ...] = ()

    @property
    def lengths(self) -> list[tuple[str, int]]:
        """Lengths of training, such as ("epochs", 5) or ("steps", 1000)."""
        units = {"epochs": self.epochs, "steps": self.steps}
        return [(unit, count) for unit, counts in units.items() for count in counts or ()]


def parse_account_flags(given: Mapping[str, str], errors: list[str]) -> AccountFlags:
    """Return the valid flags, and add the faults of the others to ``errors``."""
    return valid_part(AccountFlags, given, errors)[0]


def by_name(flags: Mapping[str, str], errors: list[str]) -> dict[str, str]:
    """Return flags ("batch-size") by the names of their fields; add unknown ones to ``errors``."""
    names: dict[str, str] = {flag_name(name): name for name in FLAGS}
    errors.extend(unknown(name, FLAGS) for name in flags if name not in names)
    return {names[name]: text for name, text in flags.items() if name in names}


def ask(given: Mapping[str, str], found: Sequence[str] = ()) -> AccountQuery:
    """Convert text by flag name ("batch-size") to a validated question.

    Raises InputError with every fault, including those ``found`` before.
    """
    errors = list(found)
    named = by_name(given, errors)
    typed = parse_account_flags(named, errors)
    solve = None
    if "epsilon" in named:
        solve = "steps" if "sigma" in named else "sigma"
    errors += _faults_of_solving(named, solve)
    errors += _faults_of_search(named, solve)
    errors += [
        f"--sigma must be 0 for no noise, or at least {SIGMA_MIN:g}, not {sigma:g}."
        for sigma in typed.sigma or ()
        if 0 < sigma < SIGMA_MIN
    ]
    sizes = _sizes(named, typed, solve, errors)
    if sizes.records is not None and sizes.batch is not None:
        errors += misfits("the dataset", sizes.records, sizes.batch, sizes.epochs or ())
    raise_errors(errors)
    assert sizes.records is not None  # noqa: S101  (without them, an error was raised above)
    assert sizes.batch is not None  # noqa: S101
    return AccountQuery(
        dataset_size=sizes.records,
        batch_size=sizes.batch,
        epochs=sizes.epochs,
        steps=typed.steps,
        sigma=typed.sigma,
        epsilon=typed.epsilon,
        solve=solve,
        delta=typed.delta,
        sampler=typed.sampler,
        accountant=typed.accountant,
        trials=None if typed.tune is None else trials_of(typed.tune),
        said=sizes.said,
    )


class _Sizes(NamedTuple):
    """Sizes of a run, and what its recipe chose."""

    records: int | None
    batch: int | None
    epochs: tuple[int, ...] | None
    said: tuple[str, ...] = ()


def _sizes(
    named: Mapping[str, str],
    flags: AccountFlags,
    solve: str | None,
    errors: list[str],
) -> _Sizes:
    """Return the sizes that were given, or else those of a dataset with its recipe."""
    batch, epochs = flags.batch_size, flags.epochs
    facts = None
    if "dataset" in named or "dataset_size" not in named:
        facts = DATASETS.get(named.get("dataset", flags.dataset))
    else:
        errors += [f"--{name} needs --dataset." for name in ("recipe", "model") if name in named]
    if facts is None:
        return _Sizes(flags.dataset_size, batch, epochs)
    run = _run(flags, solve)
    planned = completed(run, facts)
    if batch is None:
        batch = planned.batch_size
    if epochs is None and flags.steps is None and solve != "steps":
        epochs = None if planned.epochs is None else (planned.epochs,)
    return _Sizes(facts.train_size, batch, epochs, tuple(recipe_notes(run, facts)))


def asked(given: Mapping[str, str], found: Sequence[str] = ()) -> tuple[AccountQuery, ...]:
    """Return a question for each target epsilon whose recipe may differ, as :func:`ask` does."""
    question = ask(given, found)
    targets = question.epsilon or ()
    if not question.said or len(targets) < 2:
        return (question,)
    return tuple(ask({**given, "epsilon": repr(target)}) for target in targets)


def _run(flags: AccountFlags, solve: str | None) -> Settings:
    """Return the settings of the run whose privacy cost is asked for, as ``dpmac train`` has."""
    given: dict[str, Any] = {"dataset": flags.dataset, "recipe": flags.recipe, "model": flags.model}
    given |= {"batch_size": flags.batch_size}
    lengths = ((length or (0,))[0] or None for length in (flags.epochs, flags.steps))
    given["epochs"], given["steps"] = lengths
    if solve == "sigma" and flags.epsilon:
        given["epsilon"] = flags.epsilon[0]
    else:
        given["sigma"] = 1.0
    return Settings.model_validate(given)


def _faults_of_solving(given: Mapping[str, str], solve: str | None) -> Iterator[str]:
    """Yield settings that contradict the requested answer, or are missing for it."""
    for one, other in _EITHER:
        if one in given and other in given:
            yield (f"--{flag_name(one)} and --{flag_name(other)} contradict each other: give one.")
    if solve and "0" in given.get("sigma", "").split(","):
        yield "--sigma 0 adds no noise, so its epsilon is infinite: nothing can be solved for."
    for name in SOLVABLE[solve] if solve else ():
        if name in given:
            yield (
                f"--sigma, --epsilon and --{flag_name(name)} together leave nothing to solve for: "
                "leave one out."
            )
    if missing := [*_missing(given, solve)]:
        them = "it" if len(missing) == 1 else "them"
        yield f"Add {', and '.join(missing)}: without {them} there is no answer."


def _faults_of_search(given: Mapping[str, str], solve: str | None) -> Iterator[str]:
    """Yield settings that do not apply to a search."""
    if "tune" not in given:
        return
    if solve not in (None, "sigma"):
        yield f"--tune can only solve for sigma, not for {solve}: leave out --sigma."
    if given.get("accountant", DEFAULT_ACCOUNTANT) != DEFAULT_ACCOUNTANT:
        yield f"--tune needs privacy curves: add --accountant {DEFAULT_ACCOUNTANT}."


#: Flags of which one may be given.
_EITHER: tuple[tuple[str, str], ...] = (
    ("epochs", "steps"),
    ("dataset", "dataset_size"),
)


def _missing(given: Mapping[str, str], solve: str | None) -> Iterator[str]:
    """Yield flags without which there is no answer."""
    if solve is None and "sigma" not in given:
        yield "--sigma (to compute epsilon) or --epsilon (to compute sigma)"
    if "dataset_size" in given and "dataset" not in given:  # a dataset has defaults for these
        if "batch_size" not in given:
            yield "--batch-size"
        if "epochs" not in given and "steps" not in given and solve != "steps":
            yield "--epochs or --steps"
