"""DP-MacAdam's scale without any data: how much of its adaptation is to its own noise?

Feeds the geometry private means of nothing but noise, d and B of the MNIST runs, and prints the
shares of coordinates on h1 and h2 at an even and an odd step.

    python benchmarks/noise_only.py
"""

import torch

from dpmac_cli.dp.geometry import MacAdam, joined
from dpmac_cli.dp.mechanism import GaussianMechanism
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim.dp_macadam import Kappa
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise

PARAMETERS, BATCH, H1, H2 = 795_010, 256, 1e-9, 1e-6
STEPS = 200
KAPPAS: tuple[Kappa, ...] = ("paper", "exact", "tracked")


def shares(sigma: float, kappa: Kappa) -> list[tuple[float, float]]:
    """(share on h1, share on h2) at the last two steps."""
    theta = torch.zeros(PARAMETERS)
    geometry = MacAdam(0.9, H1, H2, kappa)
    region, spread = geometry.start(theta)
    moments = Moments(torch.zeros_like(theta), torch.zeros_like(theta))
    mechanism = GaussianMechanism(sigma, BATCH)
    noise = Noise(make_keys(0).noise)
    seen = []
    for step in range(1, STEPS + 1):
        private = mechanism.release(torch.zeros_like(theta), region, noise.at(step))
        moments.step = step
        moments.update(private.value, 0.9, 0.999)
        geometry.begin(step, spread)
        region = joined(region, [geometry.next(private, moments, region, spread)])
        if step > STEPS - 2:
            low, high = geometry.measures(region).values()
            seen.append((low, high))
    return seen


def main() -> None:
    """Print a line a setting."""
    for kappa in KAPPAS:
        for sigma in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
            pairs = ", ".join(f"{low:.1%} / {high:.1%}" for low, high in shares(sigma, kappa))
            print(f"{kappa:8} sigma {sigma:g}: on h1 / on h2 {pairs}", flush=True)


if __name__ == "__main__":
    main()
