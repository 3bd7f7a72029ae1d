"""Privacy cost of limiting Poisson-sampled batches to B + k sqrt(B) records, by dp-accounting.

A limit gives every step the same shape. Records beyond it are dropped at random, which makes
removing one record bring in another (Ganesh et al. 2025, arXiv 2508.15089).

    python benchmarks/truncated_poisson.py
"""

import math

import dp_accounting
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

DELTA = 1e-5
#: Name, n, B, sigma and steps.
TRAININGS = (("MNIST", 60_000, 256, 1.0, 1175), ("CIFAR-10", 50_000, 512, 0.8, 490))
LIMITS = (0, 1, 2, 3, 4, 5, 6)


def epsilon(event: dp_accounting.DpEvent, steps: int) -> float:
    """Return the privacy cost of some steps."""
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))
    return float(accountant.get_epsilon(DELTA))


def main() -> None:
    """Print a table as in docs/accounting.md."""
    for name, size, batch, sigma, steps in TRAININGS:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        whole = dp_accounting.PoissonSampledDpEvent(batch / size, gaussian)
        print(f"{name}: Poisson {epsilon(whole, steps):.4f}")
        for k in LIMITS:
            most = math.ceil(batch + k * math.sqrt(batch))
            limited = dp_accounting.TruncatedSubsampledGaussianDpEvent(
                size, batch / size, most, sigma
            )
            print(f"  at most {most} ({most / batch - 1:.0%} more): {epsilon(limited, steps):.4f}")


if __name__ == "__main__":
    main()
