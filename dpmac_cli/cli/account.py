"""dpmac account: the privacy cost of training, and settings that meet a target."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
from pydantic import StrictBool
from rich.console import Console
from rich.text import Text

from dpmac_cli.accounting import calibration
from dpmac_cli.accounting.account import Account
from dpmac_cli.accounting.accountants import ACCOUNTANTS, DEFAULT_ACCOUNTANT, accountant_name
from dpmac_cli.accounting.events import ADJACENCY, TrainingEvent
from dpmac_cli.accounting.places import overflow_of
from dpmac_cli.accounting.pricing import Row, accountant_note, price
from dpmac_cli.accounting.risk import PRIORS, STATED, Risk, assess_risk, percent
from dpmac_cli.accounting.selection import epsilon_of
from dpmac_cli.accounting.statements import format_epsilon, meaning, unit_of
from dpmac_cli.cli import console, late
from dpmac_cli.cli.options import command, faults_of_file
from dpmac_cli.config.checks import delta_note, misfits
from dpmac_cli.config.datasets import DATASETS
from dpmac_cli.config.defaults import completed, recipe_notes
from dpmac_cli.config.flags import OneOf, Several, SomePath, is_given, lonely, valid
from dpmac_cli.config.named import BEST, PAPER
from dpmac_cli.config.plan import ROUNDS, SHARE, Shares, histograms_of, shares_of_counts
from dpmac_cli.config.settings import (
    DELTA,
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
from dpmac_cli.files import finite_or_none, to_json
from dpmac_cli.release.plots import KINDS, trade_offs, write_figure
from dpmac_cli.silo.rounds import ACCOUNT, read_rounds
from dpmac_cli.silo.rounds import ROUNDS as ROUNDS_OF_SILO

#: Accountants to use, by the value of ``--accountant``.
USED = {**{name: (name,) for name in ACCOUNTANTS}, "all": tuple(ACCOUNTANTS)}


class Question(Priced, frozen=True):
    """Flags of ``dpmac account``: as given, or completed; None for what is to be solved for.

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
    """Count the records before training, to find ranges of columns that are not declared, at a
    tenth of the budget (of mu^2)."""
    accountant: Annotated[str, OneOf(USED)] = DEFAULT_ACCOUNTANT
    """Accounting method."""
    not_both = MappingProxyType({("epochs", "steps"): "", ("dataset", "dataset_size"): ""})

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude each other."""
        yield from super().contradictions(given)
        if "dataset_size" in given and "dataset" not in given:
            yield from (f"--{n} needs --dataset." for n in ("recipe", "model") if n in given)
        lengths = given.keys() & {"epochs", "steps"}
        if solved := {"epsilon", "sigma"} <= given.keys():
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

    def sizes(self, target: float | None) -> "Sizes":
        """Return the sizes of a run. Raises InputError."""
        size, batch, epochs = self.dataset_size, self.batch_size, self.epochs
        notes = tuple[str, ...]()
        before = ROUNDS if self.ranges else ()
        shares: Shares = before, (SHARE,) * (self.calibration == HISTOGRAM)
        if size is None:
            shared = {name: self.explicit.get(name) for name in Priced.model_fields}
            lengths = {"epochs": self.epochs, "steps": self.steps}
            given = {name: of[0] or None for name, of in lengths.items() if of}
            noise = {"epsilon": target} if self.solve == "sigma" else {"sigma": 1.0}
            facts = DATASETS[self.dataset]
            run = Settings.model_validate({**shared, **given, **noise})
            found, notes = completed(run, facts), tuple(recipe_notes(run, facts))
            size, batch = facts.train_size, found.batch_size
            _, after = shares_of_counts(found, facts)
            shares = before, after
            if not given and self.solve != "steps" and found.epochs is not None:
                epochs = (found.epochs,)
        raise_errors(misfits("the dataset", size, batch, epochs or ()))
        steps = [count * math.ceil(size / batch) for count in epochs or ()]
        counts = (*steps, *(self.steps or ())) or (1,)
        return Sizes(size, batch, counts, notes, shares)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run: n, B, numbers of steps, 1 if they are solved for.

    ``notes`` are on the recipe that they are from, and ``shares`` those of the budget that
    histograms of the training records have.
    """

    records: int
    batch: int
    lengths: tuple[int, ...]
    notes: tuple[str, ...]
    shares: Shares


def answer(question: Question) -> tuple[list[Row], tuple[str, ...], list[str]]:
    """Return a row for each combination of values, notes, and why targets cannot be met.

    Raises InputError.
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
    """Return an event with what is solved for; ``others`` are within the target, too."""
    asked = (event, question.delta, target, accountant)
    match question.solve:
        case "sigma":
            return replace(event, noise_multiplier=calibration.calibrate_noise(*asked, others))
        case "steps":
            return replace(event, steps=calibration.longest_run(*asked, others))
    return event


def account_notes(row: Row, accountant: str) -> Iterator[str]:
    """Yield what is legal, but probably not what was meant; ``accountant`` was asked for."""
    if row.dataset_size is not None:
        yield from delta_note(row.delta, row.dataset_size)
    if DEFAULT_ACCOUNTANT in USED[accountant]:
        yield from accountant_note(row.events, row.delta)


#: Relative difference of epsilon that is allowed between versions of an accountant.
TOLERANCE = 1e-3
#: Flags that may be combined with a run, which determines everything else.
BESIDE_A_RUN = ("delta", "accountant")
#: Values of a row that --json shows unchanged.
IN_JSON = (
    *("statement", "delta", "noise_multiplier", "sampling_rate", "steps", "epochs", "sampler"),
    *("accountant", "compositions", "dataset_size", "batch_size", "solved"),
)


class AccountFlags(Question, frozen=True):
    """Flags of the command: the question, and how it is answered."""

    risk: StrictBool = False
    """Also show bounds on what an attacker can learn."""
    plot: SomePath | None = None
    """Draw the trade-off curve of --risk (.png, .svg or .pdf). An existing file is replaced."""
    json: PrintJson = False  # type: ignore[assignment]
    debug: Debug = False

    @classmethod
    def contradictions(cls, given: Mapping[str, Any]) -> Iterator[str]:
        """Yield the faults of flags that exclude or need each other."""
        yield from super().contradictions(given)
        yield from lonely(given, {"plot": ("risk",)})
        if "risk" in given and given.get("accountant") in ("rdp", "all"):
            yield "--risk needs privacy loss distributions: add --accountant pld."


RunOrAccount = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="Run folder or report to recompute epsilon for; or an account on disk, or the folder "
        "of a silo, to read.",
    ),
]


@command(AccountFlags.model_fields)
def account(
    run: RunOrAccount = None,
    **given: Any,
) -> None:
    """Compute the privacy cost of training in advance, the noise for a budget, or the longest run.

    Sizes and epochs default to those of the dataset (default: mnist). With --epsilon, the
    command solves for the noise, or for the longest run if --sigma is given. --sigma, --epochs,
    --steps and --epsilon accept several values (0.5,0.6,0.7) and print a table. With a run folder,
    the privacy cost of the run is recomputed from its report. With an account on disk, or a silo's
    folder, the command prints what is spent and left.

    Examples:

        dpmac account --sigma 1.0 --epochs 5

        dpmac account --epsilon 3

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, or a report whose epsilon is wrong,
    3 target out of reach.
    """
    errors = list[str]()
    if run is not None:
        errors += (
            f"{{{name}}} contradicts {run}, which has all facts of the run. Leave it out."
            for name, value in given.items()
            if name in Question.model_fields and name not in BESIDE_A_RUN and is_given(value)
        )
    flags = valid(AccountFlags, given, errors)
    if run is not None and (file := account_file(run)) is not None:
        raise_errors((*errors, *_of_accounts(given)))
        _print_account(file, as_json=flags.json)
        return
    if flags.plot:
        errors += faults_of_file(flags.plot, KINDS, True, "plot")
    raise_errors(errors)
    with console.waiting(flags.json, "privacy cost"):
        if run is not None:
            rows, *of_report = recount(run, flags)
            notes, beyond = tuple[str, ...](), list[str]()
        else:
            rows, notes, beyond = answer(flags)
        if beyond and not rows:
            raise BudgetError(beyond)
        if flags.risk:
            rows = [_with_risk(row) for row in rows]
        if flags.plot:
            write_figure(trade_offs(rows), flags.plot)
    of_rows = (note for row in rows for note in account_notes(row, flags.accountant))
    console.print_notes(dict.fromkeys([*notes, *of_rows]))
    if flags.json:
        console.print_result(to_json({"rows": [_values(row) for row in rows]}))
    else:
        _print(console.stdout(), rows)
    if run is not None:
        _judge(*of_report)
    if beyond:
        raise BudgetError(beyond)


def account_file(path: Path) -> Path | None:
    """Return the file of an account on disk, given it or its folder; None for a run."""
    file = path / ACCOUNT if path.is_dir() else path
    named = path.is_dir() or path.suffix == ".json"
    try:
        return file if named and '"account"' in file.read_text("utf-8") else None
    except (OSError, UnicodeDecodeError):
        return None


def _of_accounts(given: Mapping[str, Any]) -> Iterator[str]:
    for name in ("delta", "accountant", "risk", "plot"):
        if is_given(given[name]):
            yield f"{{{name}}} is for runs. An account has its own delta and events. Leave it out."


def _print_account(file: Path, *, as_json: bool) -> None:
    """Print what is spent of an account on disk, and left, and rounds of a silo.

    Raises InputError.
    """
    kept = Account.open(file)
    events = kept.own
    values: dict[str, Any] = {
        "epsilon": finite_or_none(kept.epsilon if events else 0.0),
        "target": kept.target,
        "delta": kept.delta,
        "steps": sum(event.steps for event in events),
    }
    if file.name == ACCOUNT and (file.parent / ROUNDS_OF_SILO).exists():
        rounds = read_rounds(file.parent)
        values |= {"rounds": rounds.answered, "lost_rounds": rounds.lost(events)}
    values["statement"] = kept.statement
    if as_json:
        console.print_result(to_json(values))
        return
    out = console.stdout()
    target = "no target" if kept.target is None else f"of {kept.target:g}"
    epsilon = (f"epsilon {format_epsilon(values['epsilon'])}", "bold")
    out.print(Text.assemble(epsilon, f" {target} at delta {format_epsilon(kept.delta)}"))
    if kept.target is not None:
        left = f"{max(0.0, kept.target - kept.epsilon if events else kept.target):.4g}"
        out.print(Text(f"  {'left':<14} {left}"))
    for name in ("steps", "rounds", "lost_rounds"):
        if name in values:
            out.print(Text(f"  {name.replace('_', ' '):<14} {values[name]:,}"))
    out.print(Text(values["statement"]))


def recount(path: Path, asked: Question) -> tuple[list[Row], float, float]:
    """Recompute the privacy cost of a run from its report.

    Returns rows for the requested delta and accountants, and the stored and the correct epsilon.

    Args:
        path: a run folder, or a report.
        asked: flags, of which :data:`BESIDE_A_RUN` are used.

    Raises:
        InputError: the file is not a dpmac report, or a flag does not apply to it.
    """
    report = late.report.read_report(path)
    events, search = report.events, report.search
    if search is not None and asked.accountant != DEFAULT_ACCOUNTANT:
        raise InputError(f"{path} is of a search: use --accountant {DEFAULT_ACCOUNTANT}.")
    own_delta = report.delta or DELTA
    delta = asked.delta if "delta" in asked.explicit else own_delta
    size, data = report.data.train_size, report.data
    unit = unit_of(covered=report.settings.cover_scores or False, several=bool(data.unit))
    rows = [
        replace(price(events, delta, name, unit, search), dataset_size=size)
        for name in USED[asked.accountant]
    ]
    stored = math.inf if report.epsilon is None else report.epsilon
    return rows, stored, epsilon_of(report.done, own_delta)


def _with_risk(row: Row) -> Row:
    return replace(row, risk=assess_risk(row.done, row.dataset_size or 1, row.unit))


def _judge(stored: float, again: float) -> None:
    """Confirm that a report's epsilon is correct. Raises InputError if it is wrong."""
    said = format_epsilon(stored)
    if not math.isclose(
        again, math.inf if stored is None else stored, rel_tol=TOLERANCE, abs_tol=1e-9
    ):
        raise InputError(
            f"The report's epsilon is wrong: it is {said}, but the events in the report cost "
            f"{format_epsilon(again)}. Do not rely on it."
        )
    console.print_notes([f"the report's epsilon, {said}, is correct"])


def _values(row: Row) -> dict[str, Any]:
    """Return a row as JSON values; infinity becomes null."""
    values = {name: getattr(row, name) for name in IN_JSON}
    found = dict[str, Any]()
    if row.risk is not None:
        found["risk"] = {**row.risk.values(), "statement": row.risk.statement}
    if row.search is not None:
        found["search"] = {
            "mean": row.search.trials.mean,
            "most": row.search.trials.most,
            "epsilon_of_a_trial": finite_or_none(row.search.trial_epsilon(row.delta)),
        }
    epsilon = finite_or_none(row.epsilon)
    return {"epsilon": epsilon, **values, "adjacency": ADJACENCY, **found}


def _print(out: Console, rows: Sequence[Row]) -> None:
    """Print facts that differ between rows as a table, and those that they share below."""
    found = {name: [show(row) for row in rows] for name, show in FACTS.items()}
    varying = {name: cells for name, cells in found.items() if len({*cells}) > 1}
    if varying:
        cells = zip(*varying.values(), strict=True)
        out.print(console.plain_table(varying, cells, justify="right", bold="epsilon"))
    else:
        epsilon = ("epsilon " + found["epsilon"][0], "bold")
        out.print(Text.assemble(epsilon, f" at delta {found['delta'][0]}"))
    for name, (cell, *_) in found.items():
        if cell and name not in (*varying, *(() if varying else ("epsilon", "delta"))):
            out.print(Text(f"  {name:<14} {cell}"))
    if len({row.epsilon for row in rows}) == 1:
        out.print(Text(rows[0].statement))
    else:
        out.print(Text(meaning("epsilon", "delta", rows[0].unit)))
    if len(rows) == 1 and rows[0].risk is not None:
        _print_risk(out, rows[0].risk)


def _print_risk(out: Console, risk: Risk) -> None:
    """Print bounds on attacks as a table, and other bounds below."""
    out.print(Text(f"\n{risk.statement}", style="bold"))
    if risk.noiseless:
        return
    names = ("FPR", "TPR", *(f"prior {percent(prior)}" for prior in PRIORS))
    shares = (
        (attack.false_positive_rate, attack.true_positive_rate, *attack.posteriors)
        for attack in risk.attacks
    )
    rows = (map(percent, row) for row in shares)
    out.print(console.plain_table(names, rows, justify="right"))
    out.print(Text(COLUMNS_OF_RISK))
    least = format_epsilon(risk.least_delta)
    out.print(Text(f"Gaussian DP: mu {format_epsilon(risk.mu)}, for delta down to {least}"))
    costs = (" at delta ".join(map(format_epsilon, reversed(pair))) for pair in risk.epsilons)
    out.print(Text(f"epsilon {', '.join(costs)} (1/n^1.1)"))


COLUMNS_OF_RISK = (
    "TPR: highest true positive rate of any attack with this false positive rate (FPR). Columns to "
    "the right: highest probability that the record was in the training data, given an alarm at "
    "this FPR or a higher one, by prior probability."
)


def _rate(row: Row) -> str:
    if row.events[0].sampling.once_an_epoch:
        return f"each record in one of every {row.events[0].steps_per_epoch} steps"
    return "" if row.sampling_rate is None else f"{row.sampling_rate:.6g}"


def _search(row: Row) -> str:
    if row.search is None:
        return ""
    mean, most = row.search.trials.mean, row.search.trials.most
    one = format_epsilon(row.search.trial_epsilon(row.delta))
    return f"mean {mean:g}, at most {most:,}, each of epsilon {one}"


def _histograms(events: Sequence[TrainingEvent]) -> str:
    """Return the number of histograms and the noise multiplier of each; "" for none."""
    noises = [
        f"{event.noise_multiplier:.10g}"
        + (f" at rate {event.sampling_rate:.4g}" if event.sampling_rate < 1 else "")
        for event in events
    ]
    several = "s" * (len(noises) > 1)
    return f"{len(noises)}, with noise multiplier{several} {', '.join(noises)}" if noises else ""


#: Facts of a row by name; empty if not applicable.
FACTS: Mapping[str, Callable[[Row], str]] = {
    "epsilon": lambda row: format_epsilon(row.epsilon),
    "delta": lambda row: format_epsilon(row.delta),
    "sigma": lambda row: "" if row.noise_multiplier is None else f"{row.noise_multiplier:.10g}",
    "batch": lambda row: f"{row.batch_size:,} of {row.dataset_size:,}" if row.batch_size else "",
    "sampling rate": _rate,
    "epochs": lambda row: "" if row.epochs is None else f"{row.epochs:.4g}",
    "steps": lambda row: f"{row.steps:,}",
    "trials": _search,
    f"TPR at {percent(STATED)} FPR": lambda row: percent(row.risk.stated) if row.risk else "",
    "mu": lambda row: format_epsilon(row.risk.mu) if row.risk else "",
    "histograms": lambda row: _histograms([event for event in row.events if event.histogram]),
    "sampler": lambda row: row.sampler,
    "adjacency": lambda _: ADJACENCY,
    "accountant": lambda row: accountant_name(row.accountant),
    "compositions": lambda row: f"{row.compositions:,}",
}
