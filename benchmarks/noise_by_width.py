"""Measure noise relative to signal by network width: coordinate-wise and isotropic clipping.

Trains networks of several widths on MNIST with DP-MacAdam and stops now and then. There, on the
same parameters and records, it asks what a step's noise would weigh beside its signal

    (expected norm of the noise) / (projection of E[g-tilde] on the true mean gradient)

for the ellipsoid as it stands, for balls of several radii C about 0 and about the same centre
m-hat, and for an ellipsoid about 0 with line 20's scale for the true standard deviations of the
gradient's coordinates, at several sizes: what scaling by coordinates could gain at best. The true
gradient is not private: this is a study of public data, no part of the tool.

    python benchmarks/noise_by_width.py docs/data/noise_by_width.jsonl
"""

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from sittings import Setting, carry_on, product, results
from torch import Tensor, nn

from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.loaders import load_data
from dpmac_cli.data.registry import DATASETS
from dpmac_cli.dp.clipping.norms import RegionMetric
from dpmac_cli.dp.clipping.outer_products import OuterProducts
from dpmac_cli.dp.mechanism import Ellipsoid, GaussianMechanism, ball, ellipsoid
from dpmac_cli.dp.precision import full_float32
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import KeyedSampler
from dpmac_cli.runs.trainer import Trainer
from dpmac_cli.step import RECORD_UNIT, carry
from dpmac_cli.storage.paths import data_folder
from dpmac_cli.training.chunks import DataSum
from dpmac_cli.training.schedules import StepPlan

WIDTHS = (30, 100, 300, 1000, 3000)
BATCH, RECORDS, STEPS, EVERY = 256, 1024, 200, 50
RADII = (0.01, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0)
SIZES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
#: The least standard deviation of a coordinate, relative to their mean: many pixels are always 0.
FLOOR = 1e-3
NO_CLIPPING = 2.0**40


def build(width: int, sigma: float, kappa: Any) -> Trainer:
    """A trainer of an MLP that wide, with the paper's settings for MNIST."""
    torch.manual_seed(0)
    facts = DATASETS["mnist"]
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10))
    keys = make_keys(0)
    config = resolve({"dataset": "mnist", "optimizer": "dp-macadam", "kappa": kappa}).plan
    data = load_data("mnist", data_folder(None), torch.device("cpu"))
    plan = StepPlan(steps=STEPS, steps_per_epoch=STEPS, physical_batch=RECORDS)
    with full_float32():
        return Trainer(
            DataSum(model, data, plan, BATCH, None),
            optimizer=config.optimizer,
            mechanism=GaussianMechanism(sigma, BATCH),
            plan=plan,
            sampler=KeyedSampler("poisson", size=facts.train_size, batch=BATCH, key=keys.sampler),
            noise=Noise(keys.noise),
            training=carry(model, config, RECORD_UNIT),
        )


def expected_mean(trainer: Trainer, region: Ellipsoid) -> Tensor:
    """E[g-tilde] over the first records, were the region clipped to, shape (d,)."""
    data, out = trainer.data, torch.empty_like(trainer.state.theta)
    x = data.standardised(data.train.images[:RECORDS])
    trainer.sums.clipped_sum.of(x, data.train.labels[:RECORDS], RegionMetric(region), out)
    return out / RECORDS + (0 if region.is_ball else region.centre)


def ideal(trainer: Trainer, mean: Tensor) -> Ellipsoid:
    """About 0, line 20 with the true standard deviation of the gradient's coordinates."""
    data = trainer.data
    x = data.standardised(data.train.images[:RECORDS])
    y = data.train.labels[:RECORDS]
    gradients = trainer.sums.clipped_sum.gradients(x, y, ball=False)
    squares = []
    for _, form in gradients:
        assert isinstance(form, OuterProducts)
        delta = form.delta.squeeze(1).square()
        squares += [(delta.T @ form.a.squeeze(1).square()).flatten(), delta.sum(0)]
    s = (torch.cat(squares) / RECORDS - mean.square()).clamp(min=0).sqrt()
    s.clamp_(min=FLOOR * float(s.mean()))
    return ellipsoid(torch.zeros_like(s), (s * s.sum()).sqrt())


def compare(trainer: Trainer) -> dict[str, Any]:
    """Noise over signal for each way to clip, at the present parameters."""
    theta, region = trainer.state.theta, trainer.state.region
    d, sigma = theta.numel(), trainer.mechanism.noise_multiplier
    true = expected_mean(trainer, ball(NO_CLIPPING, theta))
    direction = true / true.norm()

    def ratio(tried: Ellipsoid) -> float | None:
        scale = tried.scale.double().square().sum() * (d if tried.is_ball else 1)
        signal = float(expected_mean(trainer, tried) @ direction)
        return float(scale.sqrt()) * sigma / BATCH / signal if signal > 0 else None

    best = ideal(trainer, true)
    constant = torch.ones_like(theta)
    return {
        "gradient": float(true.norm()),
        "ellipsoid": ratio(region),
        "balls": {str(c): ratio(ball(c, theta)) for c in RADII},
        "centred": {str(c): ratio(ellipsoid(region.centre, c * constant)) for c in RADII},
        "ideal": {str(t): ratio(ellipsoid(best.centre, t * best.scale)) for t in SIZES},
        "spread_of_b": float(region.scale.log().std()),
    }


def measure(setting: Setting) -> dict[str, Any]:
    """Train, and compare every so often."""
    trainer = build(setting["width"], setting["sigma"], setting["kappa"])
    found = []
    for step in range(1, STEPS + 1):
        trainer.step()
        if step % EVERY == 0:
            found.append({"step": step, **compare(trainer)})
    return {"parameters": trainer.state.theta.numel(), "found": found}


def as_markdown(file: Path) -> str:
    """Noise over signal at the last look, a line a noise and width: the best of each kind."""
    lines = [
        "| sigma | d | ellipsoid | C = 1 | best C | ideal | best C / ideal |",
        "|---" * 7 + "|",
    ]
    for row in results(file):
        if row["kappa"] != "tracked":
            continue
        look = row["found"][-1]
        ball, best = (min(filter(None, look[kind].values())) for kind in ("balls", "ideal"))
        ratios = (look["ellipsoid"] or math.nan, look["balls"]["1.0"], ball, best, ball / best)
        cells = [f"{row['sigma']:g}", f"{row['parameters']:,}", *(f"{r:.3g}" for r in ratios)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is not there yet, and print a table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    settings = product(kappa=("paper", "tracked"), sigma=(0.5, 1.0), width=WIDTHS)
    carry_on(settings, measure, options.file)
    print(as_markdown(options.file))


if __name__ == "__main__":
    main()
