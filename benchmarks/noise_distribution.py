"""Test the distribution of the noise: moments, tails, lags, steps and requests.

    python benchmarks/noise_distribution.py --json docs/data/noise_distribution.json    # 2 minutes

Each way to draw (float32, float64, secure) gives 5 * 10^7 normals: 12 steps, each with several
requests. Every statistic is standard normal if the noise is; the script ends with
an error if one is beyond 5 standard deviations, or the sum of the squares of all of them is in the
outer 10^-4 of its distribution.

Ranks need no row: only the first rank draws, see ``tests/test_ranks.py``.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import parser_of, write_json
from scipy.stats import chi2, norm
from torch import Tensor

from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise

STEPS, REQUESTS = 12, (3_000_001, 1_000_000, 166_666)
EDGES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 4.5, 5.0)
LAGS = (1, 2, 3, 64, 4096)
BINS = 1000
#: Largest statistic that is taken for chance, in standard deviations.
LIMIT, TAIL = 5.0, 1e-4
WAYS = {
    "float32": (torch.float32, False),
    "float64": (torch.float64, False),
    "secure": (torch.float64, True),
}


def moments(z: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the first six moments, minus those of N(0, 1), in standard deviations."""
    expected = {1: 0, 2: 1, 3: 0, 4: 3, 5: 0, 6: 15}
    variances = {1: 1, 2: 2, 3: 15, 4: 96, 5: 945, 6: 10170}
    for power, mean in expected.items():
        off = float(z.pow(power).mean()) - mean
        yield f"moment {power}", off / math.sqrt(variances[power] / len(z))


def tails(z: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the number of draws beyond each edge on each side."""
    for edge in EDGES:
        expected = len(z) * float(norm.sf(edge))
        for side, beyond in (("above", z > edge), ("below", z < -edge)):
            spread = math.sqrt(expected * (1 - expected / len(z)))
            yield f"{side} {edge:g}", (int(beyond.sum()) - expected) / spread


def cells(z: Tensor) -> Iterator[tuple[str, float]]:
    """Yield chi-squared over cells of equal probability, as a standard normal number."""
    edges = torch.from_numpy(norm.ppf(np.arange(1, BINS) / BINS))
    counts = torch.bincount(torch.bucketize(z, edges), minlength=BINS).double()
    expected = len(z) / BINS
    value = float((counts - expected).square().sum() / expected)
    yield f"{BINS} cells", (value - (BINS - 1)) / math.sqrt(2 * (BINS - 1))


def correlations(name: str, x: Tensor, y: Tensor) -> Iterator[tuple[str, float]]:
    """Yield the correlations of two halves, of their squares and of their fourth powers."""
    for power in (1, 2, 4):
        a, b = (t.pow(power) - t.pow(power).mean() for t in (x, y))
        yield (
            f"{name}, power {power}",
            float((a * b).mean() / (a.square().mean() * b.square().mean()).sqrt())
            * math.sqrt(len(x)),
        )


def statistics(steps: list[list[Tensor]]) -> Iterator[tuple[str, float]]:
    """Yield every statistic of the draws of all steps, each with its name."""
    z = torch.cat([request for step in steps for request in step])
    yield from (*moments(z), *tails(z), *cells(z))
    for lag in LAGS:
        yield from correlations(f"lag {lag}", z[:-lag], z[lag:])
    first = [torch.cat(step) for step in steps]
    yield from correlations("next step", torch.cat(first[:-1]), torch.cat(first[1:]))
    short = min(map(len, steps[0]))
    requests = [[r[:short] for r in step] for step in steps]
    one, other = (torch.cat([r[k] for r in requests]) for k in (0, 1))
    yield from correlations("next request", one, other)


def measure(way: str) -> dict[str, Any]:
    """Return the statistics of one way to draw."""
    dtype, secure = WAYS[way]
    noise = Noise(make_keys(2024).noise, secure=secure)
    steps = []
    for step in range(1, STEPS + 1):
        source = noise.at(step)
        likes = [torch.empty(count, dtype=dtype) for count in REQUESTS]
        steps.append([source.standard_normal(like).double() for like in likes])
    draws = sum(len(request) for step in steps for request in step)
    distinct = len(torch.unique(steps[0][0]))
    found = {name: round(value, 3) for name, value in statistics(steps)}
    squares = sum(value**2 for value in found.values())
    return {
        "draws": draws,
        "distinct in the first request": distinct,
        "largest": max(found.values(), key=abs),
        "p of the sum of squares": round(float(chi2.sf(squares, len(found))), 5),
        "statistics": found,
    }


def main() -> None:
    """Test every way to draw; print and write the statistics."""
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the statistics there")
    options = parser.parse_args()
    results = {way: measure(way) for way in WAYS}
    for way, found in results.items():
        print(f"{way}: { ({k: v for k, v in found.items() if k != 'statistics'}) }")
    write_json(options.json, results)
    beyond = [way for way, found in results.items() if abs(found["largest"]) > LIMIT]
    off = [w for w, found in results.items() if found["p of the sum of squares"] < TAIL]
    if beyond or off:
        raise SystemExit(f"not normal: {beyond + off}")


if __name__ == "__main__":
    main()
