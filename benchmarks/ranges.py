"""Measure the private ranges of columns, and the time that they take.

    python benchmarks/ranges.py docs/data/ranges.json

Ten columns at epsilon 1 (delta 1e-5), with the part of the budget that ranges have by default, 200
runs: ends of the ranges, numbers outside, errors of ranks. Errors are the largest of 20 quantiles,
and 0 between the shares of numbers below and up to a value.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import parser_of, write_json

from dpmac_cli.accounting.calibration import noise_of_share
from dpmac_cli.accounting.events import histogram_event
from dpmac_cli.config.plan import ROUNDS
from dpmac_cli.features.counts import distributions
from dpmac_cli.randomness.noise import Noise

EVENTS = tuple(histogram_event(noise_of_share(1.0, 1e-5, share)) for share in ROUNDS)
RECORDS, RUNS = (1000, 5000, 30_000), 200
#: Records and columns that are timed.
TIMED = 300_000, 40
#: Columns by name.
COLUMNS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "years, 1990 to 2010": lambda draws, n: draws.integers(1990, 2011, n),
    "degrees, 37.2 +- 0.6": lambda draws, n: draws.normal(37.2, 0.6, n).round(1),
    "1 to 5 million": lambda draws, n: draws.uniform(1e6, 5e6, n),
    "lognormal, median 22,000": lambda draws, n: np.exp(draws.normal(10, 1.5, n)),
    "normal, 0 +- 1": lambda draws, n: draws.normal(0, 1, n),
    "integers, 0 to 4": lambda draws, n: draws.integers(0, 5, n),
    "constant, 7": lambda draws, n: np.full(n, 7.0),
    "gamma, mean 0.0002": lambda draws, n: draws.gamma(2, 1e-4, n),
    "0, and 5% lognormal, median 1,100": lambda draws, n: np.where(
        draws.random(n) < 0.95, 0, np.exp(draws.normal(7, 1, n))
    ),
    "1,000,000 to 1,000,009": lambda draws, n: 1e6 + draws.integers(0, 10, n),
}


def table(seed: int, records: int) -> np.ndarray:
    """Return the columns, shape (records, columns)."""
    draws = np.random.default_rng(seed)
    return np.stack([of(draws, records) for of in COLUMNS.values()], 1).astype(float)


def found_in(values: np.ndarray, seed: int) -> Any:
    """Return the distributions of columns."""
    noise = Noise(seed.to_bytes(32, "little"), secure=True).at(1)
    return distributions(values, EVENTS, noise, lambda event: None)


def error(ranks: np.ndarray, numbers: np.ndarray, at: np.ndarray) -> float:
    """Return the largest error of ranks."""
    below = np.searchsorted(numbers, at, "left") / len(numbers)
    up_to = np.searchsorted(numbers, at, "right") / len(numbers)
    return max(0.0, float(np.maximum(below - ranks, ranks - up_to).max()))


def measure(records: int) -> dict[str, Any]:
    """Return medians and the 5% and 95% quantiles over the runs, by column."""
    runs = np.zeros((RUNS, len(COLUMNS), 6))
    for seed in range(RUNS):
        values = table(seed, records)
        for k, column in enumerate(found_in(values, seed)):
            numbers = np.sort(values[:, k])
            at = numbers[:: records // 20]
            outside = np.mean((numbers < column.low) | (numbers > column.high))
            true = np.quantile(numbers, [0.01, 0.99])
            errors = error(column.ranks(at), numbers, at)
            runs[seed, k] = [column.low, column.high, outside, errors, *true]
    shown = np.quantile(runs, [0.05, 0.5, 0.95], axis=0)
    names = ("low", "high", "outside", "rank_error", "true_low", "true_high")
    return {
        column: {
            name: [float(f"{end:.7g}") for end in shown[:, k, j]] for j, name in enumerate(names)
        }
        for k, column in enumerate(COLUMNS)
    }


def seconds() -> float:
    """Return the CPU seconds of a large table."""
    records, columns = TIMED
    values = np.tile(table(0, records), (1, columns // len(COLUMNS)))
    begun = time.process_time()
    found_in(values, 0)
    return round(time.process_time() - begun, 2)


def main() -> None:
    """Measure, and write and print it."""
    parser = parser_of(__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    asked = parser.parse_args()
    found: dict[str, Any] = {str(records): measure(records) for records in RECORDS}
    write_json(asked.out, {"epsilon": 1, "runs": RUNS, "seconds": seconds(), "records": found})
    for records, columns in found.items():
        for name, column in columns.items():
            print(records, name, *(f"{key} {ends}" for key, ends in column.items()), sep=" | ")


if __name__ == "__main__":
    main()
