"""Search for the defaults of a head behind a backbone: DP-Adam by n and epsilon.

python benchmarks/head_rule.py 500,2000,10000,50000 > docs/data/head_rule.txt

Heads are trained in plain torch on the features of sample_configs/cifar10-backbone.yaml, on the
first n records (means over disjoint subsets where n is small), and scored on the first 4,000 test
records. A line has n, epsilon, the six best settings as (accuracy, steps per epoch, epochs, rate),
and the rule's.
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dpmac_cli.accounting.calibration import calibrate_noise
from dpmac_cli.accounting.events import TrainingEvent
from dpmac_cli.config.resolve import resolve
from dpmac_cli.data.dataset import Split
from dpmac_cli.data.registry import EPOCHS, STEPS_PER_EPOCH
from dpmac_cli.randomness.keystream import make_keys
from dpmac_cli.runs.prepare import prepare
from dpmac_cli.storage.progress import outcome

CONFIG = Path(__file__).parents[1] / "sample_configs" / "cifar10-backbone.yaml"
RULE = (STEPS_PER_EPOCH, EPOCHS, 0.003)
SCORED = 4000
#: Delta of runs on fewer records than images of CIFAR-10.
DELTA = 1e-5


@dataclass(frozen=True)
class Way:
    """Settings of DP-Adam for a head."""

    share: int  # steps per epoch: the expected batch is n / share
    epochs: int
    rate: float
    ema: float = 0.95
    random: bool = False  # begin with torch's random weights instead of 0

    def sigma(self, n: int, epsilon: float, delta: float) -> float:
        """Return the noise multiplier for n records."""
        batch = max(1, round(n / self.share))
        steps = self.share * self.epochs
        event = TrainingEvent(batch / n, 1.0, steps, "poisson", self.share)
        return calibrate_noise(event, delta, epsilon)


def trained(
    split: Split, way: Way, sigma: float, seed: int, classes: int = 10, start: Tensor | None = None
) -> Tensor:
    """Return averaged weights, shape (classes, columns + 1); C is 1.

    They begin at ``start``, of the same shape, or at 0 or random weights.
    """
    draws = torch.Generator().manual_seed(seed)
    x, y = split.images.flatten(1), split.labels
    batch, steps = max(1, round(len(x) / way.share)), way.share * way.epochs
    reach = (x.float().square().sum(1) + 1).sqrt()
    theta = torch.zeros(classes, x.shape[1] + 1) if start is None else start.clone()
    if way.random:
        theta.uniform_(-1, 1, generator=draws).div_(x.shape[1] ** 0.5)
    average, m, v = theta.clone(), torch.zeros_like(theta), torch.zeros_like(theta)
    for step in range(1, steps + 1):
        rows = (torch.rand(len(x), generator=draws) < batch / len(x)).nonzero().squeeze(1)
        inputs = x[rows].float()
        delta = torch.addmm(theta[:, -1], inputs, theta[:, :-1].T).softmax(1)
        delta[torch.arange(len(rows)), y[rows]] -= 1
        delta *= (1 / (delta.norm(dim=1) * reach[rows])).clamp(max=1.0).unsqueeze(1)
        total = torch.cat([delta.T @ inputs, delta.sum(0).unsqueeze(1)], 1)
        g = (total + sigma * torch.randn(theta.shape, generator=draws)) / batch
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g.square()
        theta -= way.rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-12)
        average.lerp_(theta, 1 - min(way.ema, (1 + step) / (10 + step)))
    return average


def accuracy(theta: Tensor, split: Split) -> float:
    """Return the percentage of right answers."""
    logits = torch.addmm(theta[:, -1], split.images.flatten(1).float(), theta[:, :-1].T)
    return 100 * (logits.argmax(1) == split.labels).float().mean().item()


def main() -> None:
    """Search, and print a line for each n and epsilon."""
    plan = resolve({"seed": 0, "device": "cpu"}, CONFIG).plan
    data = outcome(prepare(plan, torch.device("cpu"), make_keys(plan.settings.seed))).data
    test = Split(data.test.images[:SCORED], data.test.labels[:SCORED])
    for n, epsilon in itertools.product(map(int, sys.argv[1].split(",")), (1.0, 3.0, 8.0)):
        found = []
        for per_epoch, epochs, rate in itertools.product(
            (4, 12, 36), (10, 20, 40), (0.001, 0.003, 0.01, 0.03)
        ):
            way = Way(per_epoch, epochs, rate)
            sigma = way.sigma(n, epsilon, min(DELTA, n**-1.1))
            scores = []
            for seed in range(3 if n < 5000 else 2 if n < 20_000 else 1):
                part = slice(seed * n, (seed + 1) * n)
                some = Split(data.train.images[part], data.train.labels[part])
                scores.append(accuracy(trained(some, way, sigma, seed), test))
            found.append((round(sum(scores) / len(scores), 2), per_epoch, epochs, rate))
        found.sort(reverse=True)
        rule = [row for row in found if row[1:] == RULE]
        print(n, epsilon, found[:6], "rule:", rule, flush=True)


if __name__ == "__main__":
    main()
