"""Steps that a privacy budget allows a planned run."""

from collections.abc import Sequence
from dataclasses import replace

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps, check_within_reach
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.errors import BudgetError


def affordable(plan: TrainPlan, steps: int, earlier: Sequence[TrainingEvent]) -> int:
    """Return how many of ``steps`` --max-epsilon pays for, after what was done ``earlier``.

    Raises:
        BudgetError: none.
    """
    event = plan.event_of(steps)
    if plan.max_epsilon == float("inf"):
        return steps
    count = affordable_steps(event, plan.delta, plan.max_epsilon, earlier)
    if count == 0 and steps > 0:
        first = total_epsilon((*earlier, replace(event, steps=1)), plan.delta)
        check_within_reach(first, plan.delta)
        raise BudgetError(
            f"--max-epsilon {plan.max_epsilon:g} allows no step: with the next one the run costs "
            f"{format_epsilon(first)} at sigma {plan.sigma:g}. Raise --sigma or --max-epsilon."
        )
    return count
