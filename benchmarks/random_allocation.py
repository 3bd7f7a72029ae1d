"""Price random allocation by ours, by simulation and by its authors' package, beside Poisson.

    python benchmarks/random_allocation.py 2000000 docs/data/random_allocation.jsonl
    pip install PLD_accounting numba
    python benchmarks/random_allocation.py 2000000 docs/data/random_allocation.jsonl --package

The first argument is the number of simulated runs. The package takes minutes for most rows.
"""

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

from dpmac_cli.accounting.accountants import total_epsilon
from dpmac_cli.accounting.events import TrainingEvent

DELTA = 1e-5
#: (sigma, steps of an epoch, epochs)
CASES = [(1.0, 235, 5), (0.7, 235, 5), (0.5, 235, 5), (0.8, 98, 5), (2.54, 7, 20)]
AT_ONCE = 10_000


def losses(sigma: float, steps: int, epochs: int, seed: int) -> np.ndarray:
    """Simulate privacy losses of runs with the record; shape (AT_ONCE,)."""
    draws = np.random.default_rng([seed, steps, round(100 * sigma)])
    total = np.zeros(AT_ONCE)
    for _ in range(epochs):
        normal = draws.standard_normal((steps, AT_ONCE), dtype=np.float32)
        normal[0] += 1 / sigma
        ratios = np.exp(normal / sigma - 0.5 / sigma**2)
        total += np.log(ratios.mean(0, dtype=np.float64))
    return total


def simulated(sigma: float, steps: int, epochs: int, runs: int) -> tuple[float, float]:
    """Return the 95% confidence interval of epsilon."""
    with ThreadPoolExecutor(2) as pool:
        parts = pool.map(lambda seed: losses(sigma, steps, epochs, seed), range(runs // AT_ONCE))
        found = np.concatenate(list(parts))

    def bound(epsilon: float, sign: float) -> float:
        each = np.maximum(0.0, -np.expm1(epsilon - found))
        return float(each.mean() + sign * 1.96 * each.std() / math.sqrt(found.size) - DELTA)

    ends = (brentq(bound, 1e-3, found.max(), args=(sign,)) for sign in (-1.0, 1.0))
    low, high = ends
    return low, high


def package(sigma: float, steps: int, epochs: int) -> list[float]:
    """Return the lower and upper bound of the package by Feldman and Shenfeld."""
    from PLD_accounting import gaussian_allocation_epsilon_configurable  # noqa: PLC0415  (optional)
    from PLD_accounting.types import (  # noqa: PLC0415  (optional)
        AllocationSchemeConfig,
        BoundType,
        PrivacyParams,
    )

    return [
        gaussian_allocation_epsilon_configurable(
            params=PrivacyParams(sigma=sigma, num_steps=steps, num_epochs=epochs, delta=DELTA),
            config=AllocationSchemeConfig(loss_discretization=1e-2, tail_truncation=1e-10),
            bound_type=kind,
        )
        for kind in (BoundType.IS_DOMINATED, BoundType.DOMINATES)
    ]


def main(runs: int, out: Path, *, with_package: bool) -> None:
    """Price the cases and write a line of JSON for each."""
    with out.open("w") as file:
        for sigma, steps, epochs in CASES:
            start = time.perf_counter()
            event = TrainingEvent(1 / steps, sigma, steps * epochs, "random-allocation", steps)
            row = {
                "sigma": sigma,
                "steps": steps,
                "epochs": epochs,
                "ours": total_epsilon((event,), DELTA),
                "seconds": time.perf_counter() - start,
                "poisson": total_epsilon((TrainingEvent(1 / steps, sigma, steps * epochs),), DELTA),
                "simulated": simulated(sigma, steps, epochs, runs),
            }
            if with_package:
                start = time.perf_counter()
                row["package"] = package(sigma, steps, epochs)
                row["package_seconds"] = time.perf_counter() - start
            print(json.dumps(row), file=file, flush=True)
            print(row, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), with_package="--package" in sys.argv)
