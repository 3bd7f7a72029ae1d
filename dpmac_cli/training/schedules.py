"""Learning rate and averaging of weights over the steps of a run.

Neither has a privacy cost: schedules act after the noise, and averages are computed from weights
that are published anyway. Does not import torch.
"""

import math

from dpmac_cli.config.settings import Settings


def rate(settings: Settings, step: int, steps: int) -> float:
    """Return the fraction of the peak learning rate in a step, in (0, 1].

    It rises linearly over the steps of the warm-up, and then follows the schedule.

    Args:
        settings: ``warmup_steps`` and ``lr_schedule``: "constant", "linear" or "cosine".
        step: step t, from 1.
        steps: last step T.
    """
    warmup, schedule = settings.warmup_steps, settings.lr_schedule
    if step <= warmup:
        return step / warmup
    done = (step - 1 - warmup) / max(1, steps - warmup)
    if schedule == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - done if schedule == "linear" else 1.0


def decay(ema: float, step: int) -> float:
    """Return the decay of the moving average of weights in a step.

    It is smaller in the first steps, so that the average forgets the initial weights.

    Args:
        ema: the setting ``ema``, the decay of late steps, below 1.
        step: step t, from 1.

    >>> [round(decay(0.95, step), 2) for step in (1, 10, 1000)]
    [0.18, 0.55, 0.95]
    """
    return min(ema, (1 + step) / (10 + step))
