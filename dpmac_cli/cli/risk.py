"""Bounds on attacks as a table, for dpmac account."""

from rich.console import Console
from rich.text import Text

from dpmac_cli.accounting.risk import PRIORS, Risk, percent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.cli import console

#: Number of deltas beside the bounds of an account, which has no number of records.
ACCOUNT_DELTAS = 2


def print_risk(out: Console, risk: Risk) -> None:
    """Print bounds on attacks as a table, and other bounds below.

    Args:
        out: the console for results.
        risk: the bounds. Without noise there are none: only the statement that says so is printed.
    """
    out.print(Text(f"\n{risk.statement}", style="bold"))
    if risk.noiseless:
        return
    names = ("FPR", "TPR", *(f"prior {percent(prior)}" for prior in PRIORS))
    rows = list[list[str]]()
    for attack in risk.attacks:
        shares = (attack.false_positive_rate, attack.true_positive_rate, *attack.posteriors)
        rows.append([*map(percent, shares)])
    out.print(console.plain_table(names, rows, justify="right"))
    out.print(Text(COLUMNS_OF_RISK))
    least = format_epsilon(risk.least_delta)
    out.print(Text(f"Gaussian DP: mu {format_epsilon(risk.mu)}, for delta down to {least}"))
    costs = list[str]()
    for delta, epsilon in risk.epsilons:
        costs.append(f"{format_epsilon(epsilon)} at delta {format_epsilon(delta)}")
    size = " (1/n^1.1)" if len(costs) > ACCOUNT_DELTAS else ""
    out.print(Text(f"epsilon {', '.join(costs)}{size}"))


COLUMNS_OF_RISK = (
    "TPR: highest true positive rate of any attack with this false positive rate (FPR). Columns to "
    "the right: highest probability that the record was in the training data, given an alarm at "
    "this FPR or a higher one, by prior probability."
)
