"""Privacy curves: delta as a function of epsilon, and the errors of every test that follow from it.

For every epsilon and its delta, a test with errors alpha and beta satisfies
``alpha + e^epsilon beta >= 1 - delta`` and the same with alpha and beta exchanged (Wasserman and
Zhou 2010; Dong, Roth and Su 2022). Each is a valid bound, so the maximum over a grid is a bound,
too.
"""

import functools
from collections.abc import Callable
from typing import Any

from dpmac_cli.accounting import accountants
from dpmac_cli.accounting.events import TrainingEvent, by_records

#: Largest epsilon of the grid, and its number of points, which differ by 0.1%.
LARGEST_EPSILON, POINTS = 700.0, 20_000
#: A grid of epsilons from 0, and upper bounds on delta at each, which never rise.
Curve = tuple[Any, Any]


@functools.lru_cache(maxsize=4)
def delta_curve(parts: tuple[TrainingEvent, ...]) -> Curve:
    """Return a grid of epsilons from 0, and upper bounds on delta at each, for merged events."""
    import numpy as np  # noqa: PLC0415  (not needed to report mistakes)

    epsilons = np.append(0.0, np.geomspace(1e-6, LARGEST_EPSILON, POINTS))
    if accountants.noiseless(parts):
        return epsilons, np.ones_like(epsilons)
    accountants.check_noise(parts)
    deltas = np.zeros_like(epsilons)
    with np.errstate(over="ignore"):
        for split in by_records(parts):
            losses = accountants.loss_distribution(split, accountants.FINE)
            deltas = np.maximum(deltas, losses.deltas(epsilons))
    falling = np.maximum.accumulate(deltas[::-1])[::-1]
    return epsilons, np.clip(falling, 0.0, 1.0)


def type_two_errors(curve: Curve, thinning: int = 1) -> Callable[[float], float]:
    """Return a lower bound on the type II error, a convex function of the type I error.

    With ``thinning``, only every k-th grid point is used, which is faster but less tight.
    """
    import numpy as np  # noqa: PLC0415  (not needed to report mistakes)

    epsilons, deltas = (values[::thinning] for values in curve)
    factors, kept = np.exp(epsilons), 1 - deltas

    def beta(alpha: float) -> float:
        found = max((kept - factors * alpha).max(), ((kept - alpha) / factors).max(), 0.0)
        return float(found)

    return beta
