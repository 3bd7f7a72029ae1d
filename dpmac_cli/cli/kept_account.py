"""Cost of an account on disk, or of a silo, and what is left of its target."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.text import Text

from dpmac_cli.accounting.account import RECORD_UNIT, Account
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.risk import Risk, assess_risk
from dpmac_cli.accounting.statements import RECORD, UNIT, format_epsilon
from dpmac_cli.cli import console
from dpmac_cli.cli.risk import ACCOUNT_DELTAS, print_risk
from dpmac_cli.errors import BudgetError, InputError, counted
from dpmac_cli.files import finite_or_none, to_json
from dpmac_cli.runs import folder
from dpmac_cli.silo.rounds import ACCOUNT, read_rounds
from dpmac_cli.silo.rounds import ROUNDS as ROUNDS_OF_SILO

#: Remedy for a path that is nothing that the command reads.
READABLE = (
    f"Use a run folder of dpmac train or the {folder.REPORT} in it, the file of an account, or the "
    "folder of a silo."
)


def account_file(path: Path) -> Path | None:
    """Return the file of an account on disk; None if the path is of a run.

    A run is recognized by its report or its settings. Whether those are valid is not checked here.

    Args:
        path: the ``.json`` file of an account, the folder of a silo (see
            :mod:`dpmac_cli.silo.silo`), the folder of a run, or the report in it.

    Raises:
        InputError: there is nothing at the path that the command reads, or the account of a silo
            is missing or cannot be read.
    """
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path} does not exist. {READABLE}")
        return path if path.suffix == ".json" and _is_account(path) else None
    file = path / ACCOUNT
    if _is_account(file):
        return file
    if (path / ROUNDS_OF_SILO).exists():
        raise InputError(
            f"{path} is the folder of a silo whose {ACCOUNT} is missing or cannot be read, so what "
            "its rounds have spent is unknown. Put the latest copy of the folder back."
        )
    if not any((path / name).exists() for name in (folder.REPORT, folder.CONFIG)):
        raise InputError(
            f"{path} contains neither the {folder.REPORT} of a run nor the {ACCOUNT} of a silo. "
            f"{READABLE}"
        )
    return None


def _is_account(file: Path) -> bool:
    """Return whether a file can be read and is one of an account, damaged or not."""
    try:
        return '"account"' in file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def print_account(file: Path, *, as_json: bool, with_risk: bool) -> None:
    """Print what is spent of an account on disk, and left, and rounds of a silo.

    Args:
        file: the file of the account.
        as_json: whether to print JSON for a program.
        with_risk: whether to add bounds on what an attacker can learn.

    Raises:
        InputError: the account or the rounds are damaged, or there are no such bounds.
    """
    kept = Account.open(file)
    events = kept.own
    values: dict[str, Any] = {
        "epsilon": finite_or_none(kept.epsilon if events else 0.0),
        "target": kept.target,
        "delta": kept.delta,
        "steps": sum(event.steps for event in events if event.trains),
        "counts_or_sums": sum(event.steps for event in events if not event.trains),
    }
    if file.name == ACCOUNT and (file.parent / ROUNDS_OF_SILO).exists():
        rounds = read_rounds(file.parent)
        values |= {
            "rounds": rounds.answered,
            "lost_rounds": rounds.lost(events),
            "rounds_left": rounds.left(events),
        }
    values["statement"] = kept.statement
    risk = _risk_of(kept, events) if with_risk and events else None
    if risk is not None:
        values["risk"] = {**risk.values(), "statement": risk.statement}
    if as_json:
        console.print_result(to_json(values))
        return
    out = console.stdout()
    target = "no target" if kept.target is None else f"of {kept.target:g}"
    epsilon = (f"epsilon {format_epsilon(values['epsilon'])}", "bold")
    out.print(Text.assemble(epsilon, f" {target} at delta {format_epsilon(kept.delta)}"))
    if kept.target is not None:
        difference = max(0.0, kept.target - (kept.epsilon if events else 0.0))
        use = _use_of_the_rest(kept, values.get("rounds_left"))
        out.print(Text(f"  {'difference':<14} {difference:.4g}{use}"))
    for name in ("steps", "counts_or_sums", "rounds", "lost_rounds"):
        if name in values:
            out.print(Text(f"  {name.replace('_', ' '):<14} {values[name]:,}"))
    out.print(Text(values["statement"]))
    if risk is not None:
        print_risk(out, risk)


def _risk_of(kept: Account, events: tuple[TrainingEvent, ...]) -> Risk:
    """Return bounds on what an attacker can learn from the events of an account.

    It has no number of records, so epsilon at delta 1/n^1.1 is left out. Raises InputError for an
    account of adaptive events, whose bounds are those of its target.
    """
    if kept.order is not None:
        raise InputError(
            "{risk} is for events that are fixed beforehand, and this account is adaptive. For its "
            f"target: dpmac account --epsilon {kept.target:g} --risk"
        )
    unit = RECORD if kept.unit == RECORD_UNIT else UNIT
    risk = assess_risk(events, 1, unit)
    return replace(risk, epsilons=risk.epsilons[:ACCOUNT_DELTAS])


def _use_of_the_rest(kept: Account, rounds: int | None) -> str:
    """Return what the rest of the budget allows, in words; "" for an account without steps.

    Costs compose and do not add up, so the difference of two epsilons says little.

    Args:
        kept: an account on disk with a target.
        rounds: number of rounds that the silo can still answer; None for other accounts.
    """
    if rounds is not None:
        return f", for {counted(rounds, 'more round')}" if rounds else ": all rounds are taken"
    steps = [event for event in kept.own if event.trains]
    if not steps:
        return ""
    try:
        kept.check(replace(steps[-1], steps=1))
    except BudgetError:
        return ", too little for another step like the last one"
    return ", enough for another step like the last one"
