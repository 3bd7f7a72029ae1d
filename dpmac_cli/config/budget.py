"""What a configuration does with the records, in the accountant's terms. Loads no torch."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.calibration import affordable_steps, calibrate_noise, check_within_reach
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.accounting.statements import format_epsilon
from dpmac_cli.config.settings import TrainConfig
from dpmac_cli.errors import BudgetError, InputError

_noise_for = lru_cache(calibrate_noise)


def training_event(config: TrainConfig, steps: int | None = None) -> TrainingEvent:
    """What a configuration whose noise is settled does with its records.

    Args:
        config: of the run.
        steps: T; None for all that the configuration asks for.

    Raises:
        InputError: there are fewer than none.
    """
    if steps is not None and steps < 0:
        raise InputError(f"steps must be at least 0, not {steps}.")
    return TrainingEvent(
        config.sampling_rate,
        config.sigma or 0.0,
        config.total_steps if steps is None else steps,
        config.sampler,
        config.steps_per_epoch,
    )


def settle_noise(config: TrainConfig) -> TrainConfig:
    """Replace a target epsilon by the least noise whose whole run costs no more."""
    if config.epsilon is None:
        return config
    event = training_event(config)
    return replace(config, sigma=_noise_for(event, config.delta, config.epsilon))


def affordable(config: TrainConfig, steps: int, earlier: Sequence[TrainingEvent]) -> int:
    """How many of the planned steps --max-epsilon pays for, after what was done ``earlier``.

    Raises:
        BudgetError: none.
    """
    event = training_event(config, steps)
    if config.max_epsilon is None:
        return event.steps
    count = affordable_steps(event, config.delta, config.max_epsilon, earlier)
    if count == 0 and event.steps > 0:
        first = total_epsilon((*earlier, replace(event, steps=1)), config.delta)
        if config.sigma:
            check_within_reach(first, config.delta)
        raise BudgetError(
            f"--max-epsilon {config.max_epsilon:g} allows no step: with the next one the run costs "
            f"{format_epsilon(first)} at sigma {config.sigma:g}. Raise --sigma or --max-epsilon."
        )
    return count
