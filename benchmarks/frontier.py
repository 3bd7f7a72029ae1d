"""Compare the paper's six optimizers with others, each at its own best learning rate.

python benchmarks/frontier.py sample_configs/bench-mnist.yaml docs/data/frontier.jsonl 0.5,0.7,1.0

A fourth argument names the optimizers to compare (dp-adam,ema), if not all.

Tuning is the same for all: on one seed that is not used again, a rate is doubled or halved for as
long as that raises the accuracy. Then five seeds at the best rate. A line has the optimizer, sigma,
rate, seed, test accuracy in percent and seconds; what is in the file is not run again. At the end
the best of each sigma is compared with every other by paired t-tests with Holm's correction.

The others live here, not in the package: none of them won. They are

* centred-adam: a ball about m-hat, that of dp-adam otherwise. Sensitivity as for any ellipsoid.
* auto-s: every gradient scaled to 1 / (norm + 0.01) (Bu et al. 2023, arXiv 2206.07136), and Adam.
* doppler: dp-adam behind a first-order low-pass filter (Zhang et al. 2024, arXiv 2408.13460).
* scale-then-privatise: b is the root of v-hat less the noise's share, so that noise is isotropic
  where Adam takes its step (Ganesh et al. 2025, arXiv 2507.01129).
* ema: dp-adam, and the average of the last parameters (0.95).
"""

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from dpmac_cli.dp.clipping import clipped_sum
from dpmac_cli.dp.clipping.norms import SquaredNorms
from dpmac_cli.dp.geometry import Geometry, Spread
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim import Optimizer, register_optimizer
from dpmac_cli.optim.dp_adam import DPAdam
from dpmac_cli.optim.optimizer import Variance

TUNING_SEED, SEEDS = 100, (0, 1, 2, 3, 4)
#: Where the search for a rate begins.
STARTS: Mapping[str, float] = {
    "dp-sgd": 0.5,
    "adaclip": 2.0,
    "dp-adam": 2e-3,
    "dp-adambc": 5e-5,
    "dp-macadam": 2e-3,
    "dp-macadambc": 1e-3,
    "centred-adam": 2e-3,
    "auto-s": 2e-3,
    "doppler": 2.5e-4,
    "scale-then-privatise": 2e-3,
    "ema": 2e-3,
}


#: Settings beside the rate.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "scale-then-privatise": {"clip_norm": 500.0},
    "ema": {"ema": 0.95},
}


@dataclass(frozen=True)
class CentredBall(Geometry):
    """A ball of radius C about m-hat. The factor is d, the sum of the sizes of the blocks."""

    clip_norm: float
    beta1: float

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread | None]:
        """A ball about the origin, as vectors."""
        d = torch.tensor(like.numel(), dtype=like.dtype)
        inverse = d * torch.full_like(like, self.clip_norm**-2)
        return Ellipsoid(torch.zeros_like(like), inverse, d), None

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """The next centre; the scale stays."""
        centre = moments.m_hat(self.beta1, out=region.centre)
        return replace(region, centre=centre, factor=torch.full_like(centre[0], len(centre)))


NOISE: dict[int, Tensor] = {}


@dataclass(frozen=True)
class Preconditioned(Geometry):
    """b = C sqrt(max(v-hat - phi, h1)), about the origin; phi is the noise's share of v-hat.

    :data:`NOISE` has the average behind phi for each block of coordinates. The factor is d.
    """

    clip_norm: float
    h1: float
    beta2: float

    def start(self, like: Tensor) -> tuple[Ellipsoid, Spread | None]:
        """A ball of radius C times the root of h1."""
        d = torch.tensor(like.numel(), dtype=like.dtype)
        inverse = d * torch.full_like(like, 1 / (self.h1 * self.clip_norm**2))
        return Ellipsoid(torch.zeros_like(like), inverse, d), None

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """The next scale."""
        key = region.inverse.data_ptr()
        before = NOISE.get(key, torch.zeros_like(private.value))
        NOISE[key] = before.lerp(private.noise_variance, 1 - self.beta2)
        phi = NOISE[key] / (1 - self.beta2**moments.step)
        signal = moments.v_hat(self.beta2).sub_(phi).clamp_(min=self.h1)
        inverse = torch.div(region.factor / self.clip_norm**2, signal, out=region.inverse)
        return replace(region, inverse=inverse, factor=torch.full_like(signal[0], len(signal)))


FILTERED: dict[int, tuple[Tensor, Tensor, float]] = {}


class Doppler(DPAdam, frozen=True):
    """Adam behind y_t = 0.9 y_{t-1} + 0.05 (x_t + x_{t-1}), divided by its response to a constant.

    :data:`FILTERED` has y, x and that response for each block of coordinates.
    """

    def update(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        """Move theta, shape (d,)."""
        key = theta.data_ptr()
        x, zero = private.value, torch.zeros_like(private.value)
        y, before, response = FILTERED.get(key, (zero, zero, 0.0))
        y = 0.9 * y + 0.05 * (x + before)
        response = 0.9 * response + 0.05 * (2 if moments.step > 1 else 1)
        FILTERED[key] = y, x.clone(), response
        super().update(theta, eta, replace(private, value=y / response), moments)


class CentredAdam(DPAdam, frozen=True):
    """DP-Adam in a ball about m-hat."""

    def geometry(self) -> Geometry:
        """The ball."""
        return CentredBall(self.clip_norm, self.beta1)


class ScaleThenPrivatise(DPAdam, frozen=True):
    """DP-Adam, with noise that is isotropic where Adam takes its step."""

    h1: Variance

    def geometry(self) -> Geometry:
        """The ellipsoid."""
        return Preconditioned(self.clip_norm, self.h1, self.beta2)


class AutoS(DPAdam, frozen=True):
    """DP-Adam, whose gradients are weighted by :func:`automatic`."""


class Averaged(DPAdam, frozen=True):
    """DP-Adam, whose parameters are averaged."""


OTHERS: Mapping[str, type[Optimizer]] = {
    "centred-adam": CentredAdam,
    "auto-s": AutoS,
    "doppler": Doppler,
    "scale-then-privatise": ScaleThenPrivatise,
    "ema": Averaged,
}


def automatic(squared: SquaredNorms, limit: float = 1.0) -> tuple[Tensor, Tensor]:
    """Weights of AUTO-S, at most ``limit`` over the norm's upper bound."""
    norm = (squared.value.clamp(min=0) + squared.slack).sqrt()
    valid = torch.isfinite(norm)
    return torch.where(valid, limit / (norm + 0.01), 0.0), valid


def offer_others() -> None:
    """Register the other optimizers."""
    for name, kind in OTHERS.items():
        register_optimizer(name)(kind)


def accuracy(config: Path, optimizer: str, sigma: float, lr: float, seed: int) -> dict[str, Any]:
    """Train once; return the line of the file."""
    from dpmac_cli import finish, resolve, train  # noqa: PLC0415  (the table is read when loaded)

    torch.set_num_threads(1)
    FILTERED.clear()
    NOISE.clear()
    weights: Callable[..., Any] = clipped_sum.clip_weights
    if optimizer == "auto-s":
        clipped_sum.clip_weights = automatic
    begun = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = {"optimizer": optimizer, "sigma": sigma, "lr": lr, "seed": seed, "device": "cpu"}
        flags |= SETTINGS.get(optimizer, {})
        report = finish(train(resolve(flags, config, out=Path(folder) / "run").plan)).report
    clipped_sum.clip_weights = weights
    reached, seconds = 100 * report["test"]["accuracy"], perf_counter() - begun
    return {**flags, "accuracy": round(reached, 2), "seconds": round(seconds, 1)}


class Bench:
    """One optimizer at one sigma; its lines are in a file."""

    def __init__(self, config: Path, file: Path, optimizer: str, sigma: float) -> None:
        self._config, self._file = config, file
        self._optimizer, self._sigma = optimizer, sigma

    def reached(self, lr: float, seed: int) -> float:
        """Return the accuracy of a run, from the file if it is there."""
        lr = float(f"{lr:.6g}")
        for line in lines(self._file):
            same = line["optimizer"] == self._optimizer and line["sigma"] == self._sigma
            if same and line["lr"] == lr and line["seed"] == seed:
                return float(line["accuracy"])
        line = accuracy(self._config, self._optimizer, self._sigma, lr, seed)
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        return float(line["accuracy"])

    def tuned(self) -> float:
        """Return the best rate: doubled or halved for as long as that helps."""
        best = STARTS[self._optimizer]
        for factor in (2.0, 0.5):
            while self.reached(best * factor, TUNING_SEED) > self.reached(best, TUNING_SEED):
                best *= factor
        return best

    def measure(self) -> tuple[float, float, list[float]]:
        """Return sigma, the best rate and the accuracy of each seed."""
        lr = self.tuned()
        return self._sigma, lr, [self.reached(lr, seed) for seed in SEEDS]


def lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what is in the file."""
    if file.exists():
        yield from map(json.loads, file.read_text().splitlines())


def measured(job: tuple[Path, Path, str, float]) -> tuple[str, float, float, list[float]]:
    """Carry out one :class:`Bench`, in a process of its own."""
    offer_others()
    return job[2], *Bench(*job).measure()


def main() -> None:
    """Run what is missing, two at a time, and print a table for each sigma."""
    config, file, sigmas = Path(sys.argv[1]), Path(sys.argv[2]), map(float, sys.argv[3].split(","))
    names = sys.argv[4].split(",") if len(sys.argv) > 4 else STARTS
    jobs = [(config, file, name, sigma) for sigma in sigmas for name in names]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        rows = pool.map(measured, jobs, chunksize=1)
    from dpmac_cli.studies.results import holm  # noqa: PLC0415  (after the table)

    for sigma in sorted({row[1] for row in rows}):
        here = sorted((row for row in rows if row[1] == sigma), key=lambda row: -sum(row[3]))
        best = here[0][3]
        p_values = [float(stats.ttest_rel(best, row[3]).pvalue) for row in here[1:]]
        behind = ["", *("yes" if worse else "no" for worse in holm(p_values))]
        print(f"sigma {sigma}")
        for (name, _, lr, found), worse in zip(here, behind, strict=True):
            print(f"  {name:22} {sum(found) / len(found):6.2f} at {lr:.3g}  behind: {worse}")


if __name__ == "__main__":
    main()
