"""dpmac account: the privacy cost of training, and settings that meet a target."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import StrictBool
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpmac_cli.accounting.accountants import ACCOUNTANTS
from dpmac_cli.accounting.pricing import Row
from dpmac_cli.accounting.risk import PRIORS, STATED, Risk, assess_risk, percent
from dpmac_cli.accounting.statements import NO_PRIVACY, format_epsilon, meaning
from dpmac_cli.cli import console
from dpmac_cli.cli.options import argument, with_options
from dpmac_cli.config.account import Question, account_notes, answer
from dpmac_cli.config.flags import SomePath, options, valid
from dpmac_cli.config.settings import Debug, PrintJson
from dpmac_cli.errors import BudgetError, InputError, raise_errors
from dpmac_cli.plots import faults_of_picture, trade_offs, write_figure
from dpmac_cli.storage.files import finite_or_none, to_json

#: Relative difference of epsilon that is allowed between versions of an accountant.
TOLERANCE = 1e-3
#: Fields of a row that --json does not show unchanged.
ASIDE = ("events", "risk", "unit", "search")


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
        """Yield the faults of flags that exclude each other."""
        yield from super().contradictions(given)
        if "plot" in given and "risk" not in given:
            yield "--plot draws the trade-off curve of --risk: add --risk."
        if "risk" in given and given.get("accountant") in ("rdp", "all"):
            yield "--risk needs privacy loss distributions: add --accountant pld."


@with_options(
    argument("run", "Run folder or report to recompute epsilon for.", required=False),
    options(AccountFlags),
)
def account(run: Path | None, **given: Any) -> None:
    """Compute the privacy cost of training in advance, the noise for a budget, or the longest run.

    Sizes and epochs default to those of the dataset (default: mnist). With --epsilon, the
    command solves for the noise, or for the longest run if --sigma is given. --sigma, --epochs,
    --steps and --epsilon accept several values (0.5,0.6,0.7) and print a table. With a run folder,
    the privacy cost of the run is recomputed from its report.

    Examples:

        dpmac account --sigma 1.0 --epochs 5

        dpmac account --epsilon 3

    Exit codes: 0 done, 1 a bug in dpmac, 2 usage or input, or a report whose epsilon is wrong,
    3 target out of reach.
    """
    errors = list[str]()
    if run is not None:
        from dpmac_cli.release.recount import excluded, recount  # noqa: PLC0415  (report's model)

        errors += excluded(run, given)
    flags = valid(AccountFlags, given, errors)
    raise_errors((*errors, *faults_of_picture(flags.plot)))
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
    console.print_notes([*notes, *account_notes(rows, flags.accountant)])
    if flags.json:
        console.print_result(to_json({"rows": [_values(row) for row in rows]}))
    else:
        _print(console.stdout(), rows)
    if run is not None:
        _judge(*of_report)
    if beyond:
        raise BudgetError(beyond)


def _with_risk(row: Row) -> Row:
    return replace(row, risk=assess_risk(row.done, row.dataset_size or 1, row.unit))


def _judge(stored: float, again: float) -> None:
    """Confirm that a report's epsilon is correct. Raises InputError if it is wrong."""
    said = format_epsilon(stored)
    if not math.isclose(again, stored, rel_tol=TOLERANCE, abs_tol=1e-9):
        raise InputError(
            f"The report's epsilon is wrong: it is {said}, but the events in the report cost "
            f"{format_epsilon(again)}. Do not rely on it."
        )
    console.print_notes([f"the report's epsilon, {said}, is correct"])


def _values(row: Row) -> dict[str, Any]:
    """Return a row as JSON values; infinity becomes null."""
    values = {name: value for name, value in vars(row).items() if name not in ASIDE}
    found: dict[str, Any] = {} if row.risk is None else {"risk": row.risk.values()}
    if row.search is not None:
        found["search"] = {
            **vars(row.search.trials),
            "epsilon_of_a_trial": finite_or_none(row.search.trial_epsilon(row.delta)),
        }
    return {**values, "epsilon": row.epsilon if math.isfinite(row.epsilon) else None, **found}


def _print(out: Console, rows: Sequence[Row]) -> None:
    """Print facts that differ between rows as a table, and those that they share below."""
    found = {name: [show(row) for row in rows] for name, show in FACTS.items()}
    varying = {name: cells for name, cells in found.items() if len({*cells}) > 1}
    if varying:
        table = Table(box=None, pad_edge=False)
        for name in varying:
            table.add_column(name, justify="right", style="bold" if name == "epsilon" else "")
        for row in zip(*varying.values(), strict=True):
            table.add_row(*row)
        out.print(table)
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
        if any(row.noise_multiplier == 0 for row in rows):
            out.print(Text(NO_PRIVACY, style="bold red"))
    if len(rows) == 1 and rows[0].risk is not None:
        _print_risk(out, rows[0].risk)


def _print_risk(out: Console, risk: Risk) -> None:
    """Print bounds on attacks as a table, and other bounds below."""
    out.print(Text(f"\n{risk.statement}", style="bold"))
    if risk.noiseless:
        return
    table = Table(box=None, pad_edge=False)
    for name in ("FPR", "TPR", *(f"prior {percent(prior)}" for prior in PRIORS)):
        table.add_column(name, justify="right")
    for attack in risk.attacks:
        shares = (attack.false_positive_rate, attack.true_positive_rate, *attack.posteriors)
        table.add_row(*map(percent, shares))
    out.print(table)
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
    "sampler": lambda row: row.sampler,
    "adjacency": lambda row: row.adjacency,
    "accountant": lambda row: ACCOUNTANTS[row.accountant],
    "compositions": lambda row: f"{row.compositions:,}",
}
