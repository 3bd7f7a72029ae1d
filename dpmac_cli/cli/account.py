"""dpmac account: the privacy cost of training, and settings that meet a target.

There are three sources of a cost: a question on a training in advance (:mod:`question`), the report
of a run, whose epsilon is computed again from its events, and an account on disk.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dpmac_cli.accounting.accountants import DEFAULT_ACCOUNTANT, accountant_name
from dpmac_cli.accounting.events import ADJACENCY
from dpmac_cli.accounting.pricing import Row, accountant_note, price
from dpmac_cli.accounting.risk import STATED, assess_risk, percent
from dpmac_cli.accounting.selection import epsilon_of
from dpmac_cli.accounting.statements import (
    SEED_GIVEN,
    cost_in_words,
    format_epsilon,
    meaning,
    unit_of,
)
from dpmac_cli.cli import console, late
from dpmac_cli.cli.kept_account import account_file, print_account
from dpmac_cli.cli.options import command, faults_of_plot
from dpmac_cli.cli.question import USED, Question, answer
from dpmac_cli.cli.risk import print_risk
from dpmac_cli.config.checks import delta_note
from dpmac_cli.config.flags import is_given, valid
from dpmac_cli.config.settings import DELTA
from dpmac_cli.errors import BudgetError, InputError, raise_errors
from dpmac_cli.files import finite_or_none, to_json
from dpmac_cli.release.plots import KINDS, trade_offs, write_figure
from dpmac_cli.runs import folder
from dpmac_cli.runs.ledger import spent_account

if TYPE_CHECKING:
    from dpmac_cli.release.report import Report

#: Relative difference of epsilon that is allowed between versions of an accountant.
TOLERANCE = 1e-3
#: Flags that do not apply to an account on disk. A run determines everything else.
OF_RUNS = ("delta", "accountant", "plot")
#: Flags that may be combined with a run.
BESIDE_A_RUN = (*OF_RUNS, "risk", "json", "debug")
#: Values of a row that --json shows unchanged.
IN_JSON = (
    *("statement", "delta", "noise_multiplier", "sampling_rate", "steps", "epochs", "sampler"),
    *("accountant", "compositions", "dataset_size", "batch_size", "solved", "seeded"),
)

RunOrAccount = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="RUN",
        help="Run folder or report to recompute epsilon for; or an account on disk, or the folder "
        "of a silo, to read.",
    ),
]


@command(Question.model_fields)
def account(
    runs: RunOrAccount = None,
    **values: Any,
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
    run = _one_of(runs or [])
    typed = [name for name, value in values.items() if is_given(value)]
    errors = [] if run is None else list(_faults_beside_run(run, typed))
    flags = valid(Question, values, errors)
    file = None if run is None else account_file(run)
    if file is not None:
        raise_errors((*errors, *_faults_beside_account(typed)))
        print_account(file, as_json=flags.json, with_risk=flags.risk)
        return
    if flags.plot:
        errors += faults_of_plot(flags.plot, KINDS)
    raise_errors(errors)
    with console.waiting(flags.json, "privacy cost"):
        if run is not None:
            rows, *epsilons = recount(run, flags)
            notes, beyond = tuple[str, ...](), list[str]()
        else:
            rows, notes, beyond = answer(flags)
        if beyond and not rows:
            raise BudgetError(beyond)
        if flags.risk:
            rows = [*map(_with_risk, rows)]
        if flags.plot:
            write_figure(trade_offs(rows), flags.plot)
    for row in rows:
        notes = (*notes, *account_notes(row, flags.accountant))
    console.print_notes(dict.fromkeys(notes))
    if flags.json:
        console.print_result(to_json({"rows": [*map(_values, rows)]}))
    else:
        _print(console.stdout(), rows)
    if run is not None:
        _judge(*epsilons)
    if beyond:
        raise BudgetError(beyond)


def _one_of(runs: Sequence[Path]) -> Path | None:
    """Return the run whose cost is asked for; None without. Raises InputError for several."""
    if len(runs) > 1:
        events = ", ".join(f"*load({str(run)!r}).events" for run in runs)
        raise InputError(
            "dpmac account reads one run or account. For the cost of several runs on the same "
            "records and with the same unit, in Python, from dpmac_cli import load, total_epsilon: "
            f"total_epsilon(({events}), delta)"
        )
    return runs[0] if runs else None


def _faults_beside_run(run: Path, typed: Iterable[str]) -> Iterator[str]:
    """Yield the faults of flags that contradict a run."""
    for name in typed:
        if name not in BESIDE_A_RUN:
            yield f"{{{name}}} contradicts {run}, which has all facts of the run. Leave it out."


# An account on disk.


def _faults_beside_account(typed: Sequence[str]) -> Iterator[str]:
    """Yield the faults of flags that do not apply to an account on disk."""
    for name in OF_RUNS:
        if name in typed:
            yield f"{{{name}}} is for runs. An account has its own delta and events. Leave it out."


# The report of a run.


def recount(path: Path, flags: Question) -> tuple[list[Row], float, float, float]:
    """Recompute the privacy cost of a run from the events in its report.

    The second and third value are at the run's own delta, also if ``flags`` ask for another one, so
    they can be compared with each other.

    Args:
        path: a run folder, or a report.json.
        flags: flags, of which ``delta`` and ``accountant`` are used. A delta that was not typed is
            that of the run.

    Returns:
        A tuple of the rows, one for each accountant that the flags name; the epsilon that the
        report states, which is infinite for a run without privacy; the correct one, computed
        from the events; and the delta of both. Comparing them is up to the caller.

    Raises:
        InputError: the file is not a dpmac report, or a flag does not apply to it.
    """
    report = _read(path)
    events, search, data = report.events, report.search, report.data
    if search is not None and flags.accountant != DEFAULT_ACCOUNTANT:
        raise InputError(f"{path} is of a search: use --accountant {DEFAULT_ACCOUNTANT}.")
    delta_of_run = report.delta or DELTA
    delta = flags.delta if "delta" in flags.explicit else delta_of_run
    unit = unit_of(covered=report.settings.cover_scores or False, several=bool(data.unit))
    rows = list[Row]()
    for accountant in USED[flags.accountant]:
        row = price(events, delta, accountant, unit, search)
        seeded = report.private and report.seeded
        rows.append(replace(row, dataset_size=data.train_size, seeded=seeded))
    stored = math.inf if report.epsilon is None else report.epsilon
    return rows, stored, epsilon_of(report.done, delta_of_run), delta_of_run


def _read(path: Path) -> "Report":
    """Return the report of a run. Raises InputError without one, with what the run has spent."""
    try:
        return late.report.read_report(path)
    except InputError as failure:
        account = None if (path / folder.REPORT).exists() else spent_account(path)
        if account is None:
            raise
        cost = cost_in_words(account.epsilon, account.delta)
        raise InputError(f"{failure} By its ledger it has spent {cost} so far.") from failure


def _judge(stored: float, correct: float, delta: float) -> None:
    """Print that a report's epsilon is correct.

    Args:
        stored: epsilon in the report.
        correct: epsilon of the events in the report.
        delta: delta of both.

    Raises:
        InputError: they differ by more than :data:`TOLERANCE`.
    """
    epsilon = format_epsilon(stored)
    if not math.isclose(correct, stored, rel_tol=TOLERANCE, abs_tol=1e-9):
        raise InputError(
            f"The report's epsilon is wrong: it is {epsilon}, but the events in the report cost "
            f"{format_epsilon(correct)}. Do not rely on it."
        )
    console.print_notes([f"the report's epsilon, {epsilon} at delta {delta:g}, is correct"])


# Rows.


def account_notes(row: Row, accountant: str) -> Iterator[str]:
    """Yield notes on what is legal, but probably not what was meant; nothing if there is none.

    Such are a delta that is large for the number of records, and one that is too small for the
    default accountant, so that epsilon is by RDP.

    Args:
        row: a privacy cost. Without a number of records, its delta is not judged.
        accountant: the value of ``--accountant``: a name of
            :data:`~dpmac_cli.accounting.accountants.ACCOUNTANTS`, or "all".
    """
    if row.dataset_size is not None:
        yield from delta_note(row.delta, row.dataset_size)
    if DEFAULT_ACCOUNTANT in USED[accountant]:
        yield from accountant_note(row.events, row.delta)


def _with_risk(row: Row) -> Row:
    """Return a row with bounds on what an attacker can learn.

    Without a number of records, they are those of a dataset of one record.
    """
    return replace(row, risk=assess_risk(row.done, row.dataset_size or 1, row.unit))


def _values(row: Row) -> dict[str, Any]:
    """Return a row as JSON values, by the names in :data:`IN_JSON` and a few more.

    Infinity becomes None. "risk" and "search" are absent where a row has neither.
    """
    values: dict[str, Any] = {"epsilon": finite_or_none(row.epsilon)}
    for name in IN_JSON:
        values[name] = getattr(row, name)
    values["adjacency"] = ADJACENCY
    if row.risk is not None:
        values["risk"] = {**row.risk.values(), "statement": row.risk.statement}
    if row.search is not None:
        values["search"] = {
            "mean": row.search.trials.mean,
            "most": row.search.trials.most,
            "epsilon_of_a_trial": finite_or_none(row.search.trial_epsilon(row.delta)),
        }
    return values


def _print(out: Console, rows: Sequence[Row]) -> None:
    """Print facts that differ between rows as a table, and those that they share below."""
    cells, varying, shared = dict[str, list[str]](), list[str](), list[str]()
    for name, text_of in FACTS.items():
        cells[name] = [*map(text_of, rows)]
        if len(set(cells[name])) > 1:
            varying.append(name)
        elif cells[name][0]:
            shared.append(name)
    if varying:
        lines = zip(*(cells[name] for name in varying), strict=True)
        out.print(console.plain_table(varying, lines, justify="right", bold="epsilon"))
    else:
        epsilon = ("epsilon " + cells["epsilon"][0], "bold")
        out.print(Text.assemble(epsilon, f" at delta {cells['delta'][0]}"))
        shared = [name for name in shared if name not in ("epsilon", "delta")]
    for name in shared:
        out.print(Text(f"  {name:<14} {cells[name][0]}"))
    if len({row.epsilon for row in rows}) == 1:
        out.print(Text(rows[0].statement))
    else:
        if rows[0].seeded:
            out.print(Text(SEED_GIVEN))
        out.print(Text(meaning("epsilon", "delta", rows[0].unit)))
    if len(rows) == 1 and rows[0].risk is not None:
        print_risk(out, rows[0].risk)


def _rate(row: Row) -> str:
    """Return the sampling rate of a row in words; "" where it has none."""
    if row.events[0].sampling.once_an_epoch:
        return f"each record in one of every {row.events[0].steps_per_epoch} steps"
    return "" if row.sampling_rate is None else f"{row.sampling_rate:.6g}"


def _search(row: Row) -> str:
    """Return the numbers of trials of a search, and the epsilon of each; "" for one training."""
    if row.search is None:
        return ""
    mean, most = row.search.trials.mean, row.search.trials.most
    epsilon = format_epsilon(row.search.trial_epsilon(row.delta))
    return f"mean {mean:g}, at most {most:,}, each of epsilon {epsilon}"


def _histograms(row: Row) -> str:
    """Return the number of counts and sums, and the noise multiplier of each; "" for none."""
    noises = list[str]()
    for event in row.events:
        if event.histogram:
            rate = f" at rate {event.sampling_rate:.4g}" if event.sampling_rate < 1 else ""
            noises.append(f"{event.noise_multiplier:.10g}{rate}")
    if not noises:
        return ""
    multipliers = "noise multiplier" if len(noises) == 1 else "noise multipliers"
    return f"{len(noises)}, with {multipliers} {', '.join(noises)}"


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
    "counts or sums": _histograms,
    "sampler": lambda row: row.sampler,
    "adjacency": lambda _: ADJACENCY,
    "accountant": lambda row: accountant_name(row.accountant),
    "compositions": lambda row: f"{row.compositions:,}",
}
