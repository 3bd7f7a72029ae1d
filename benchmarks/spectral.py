"""Try optimizers that look for the signal in the noise of a whole layer, on MNIST at sigma 1.

python benchmarks/spectral.py rule=momentum,lr=0.5 rule=shrink,lr=2 rule=dual,lr=1 ...

A prototype in plain PyTorch of 5 epochs with B = 256 and C = 1 on the paper's network: DP-SGD with
momentum, beta 0.9. Rules:

* momentum: theta - lr m-hat;
* adam: theta - lr m-hat / (sqrt(v-hat) + 1e-8);
* shrink: m-hat with its singular values shrunk as is optimal for noise of known size (Gavish and
  Donoho 2017), layer by layer;
* dual: the sum of all private gradients so far, shrunk in the same way, from the first parameters.

Beside them: seed=100, rank=16 (of the shrunk matrices), mult=1 (the first layer's rate over the
last's), weight=1 (of the first layer's gradient in the norm that is clipped), fall=0 (how much of
the rate is gone at the end, linearly), ema=0, C=1. With rule=momentum,show=1 it prints what the
weights have moved by, what noise alone would move them by, and the accuracy after that movement is
shrunk in part. MNIST lies in DPMAC_DATA_DIR. Nothing here counts as private: seeds are public.
"""

import math
import sys

import torch
from torch import Tensor, nn

from dpmac_cli.data.loaders import load_data
from dpmac_cli.storage.paths import data_folder

SIGMA, BATCH, BETA, EPOCHS = 1.0, 256, 0.9, 5


def shrunk(m: Tensor, noise: float, rank: int, basis: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return a matrix without what noise of a deviation explains, and its leading directions."""
    tall = m if m.shape[0] >= m.shape[1] else m.T
    n, p = tall.shape
    rounds = 1 if basis is not None else 6
    basis = torch.randn(p, min(rank, p)) if basis is None else basis
    for _ in range(rounds):
        basis = torch.linalg.qr(tall.T @ (tall @ basis))[0]
    left, values, right = torch.linalg.svd(tall @ basis, full_matrices=False)
    ratio, y = p / n, values / (noise * math.sqrt(n))
    kept = ((y**2 - ratio - 1) ** 2 - 4 * ratio).clamp(min=0).sqrt() / y
    kept = torch.where(y > 1 + math.sqrt(ratio), kept, 0) * noise * math.sqrt(n)
    found = (left * kept) @ (basis @ right.T).T
    return (found if tall is m else found.T), basis


class Run:
    """One training."""

    def __init__(self, settings: dict[str, str]) -> None:
        numbers = {"lr": 0.5, "seed": 100, "rank": 16, "mult": 1, "weight": 1, "fall": 0}
        numbers |= {"ema": 0, "C": 1, "show": 0}
        self.of = numbers | {k: float(v) for k, v in settings.items() if k != "rule"}
        self.rule = settings["rule"]
        torch.manual_seed(int(self.of["seed"]))
        self.net = nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10))
        self.theta = [p.data for p in self.net.parameters()]
        self.first = [p.clone() for p in self.theta]
        self.average = [p.clone() for p in self.theta]
        self.m, self.v, self.total = ([p * 0 for p in self.theta] for _ in range(3))
        self.basis: dict[int, Tensor] = {}
        self.squares = 0.0

    def private_mean(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """Return the noisy mean of clipped gradients, one tensor per parameter."""
        w1, b1, w2, b2 = self.theta
        c, weight = self.of["C"], self.of["weight"]
        z = x @ w1.T + b1
        h = z.relu()
        d2 = (h @ w2.T + b2).softmax(1)
        d2[torch.arange(len(y)), y] -= 1
        d1 = (d2 @ w2) * (z > 0)
        first = d1.square().sum(1) * (x.square().sum(1) + 1)
        last = d2.square().sum(1) * (h.square().sum(1) + 1)
        clip = (c / (weight**2 * first + last).sqrt()).clamp(max=1)[:, None]
        d1, d2 = d1 * clip, d2 * clip
        sums = (d1.T @ x, d1.sum(0), d2.T @ h, d2.sum(0))
        scales = (c / weight, c / weight, c, c)
        return [
            (total + SIGMA * scale * torch.randn_like(total)) / BATCH
            for total, scale in zip(sums, scales, strict=True)
        ]

    def step(self, t: int, steps: int, x: Tensor, y: Tensor) -> None:
        """Take a step."""
        correction = 1 - BETA**t
        self.squares = BETA**2 * self.squares + (1 - BETA) ** 2
        lr = self.of["lr"] * (1 - self.of["fall"] * (t - 1) / steps)
        noise, rank = SIGMA * self.of["C"] / BATCH, int(self.of["rank"])
        for i, g in enumerate(self.private_mean(x, y)):
            rate = lr * (self.of["mult"] if i < 2 else 1)
            self.m[i].lerp_(g, 1 - BETA)
            self.total[i] += g
            move = self.m[i] / correction
            matrix = g.ndim == 2
            if self.rule == "adam":
                self.v[i].mul_(0.999).addcmul_(g, g, value=0.001)
                move = move / ((self.v[i] / (1 - 0.999**t)).sqrt() + 1e-8)
            elif self.rule == "shrink" and matrix:
                spread = noise * math.sqrt(self.squares) / correction
                move, self.basis[i] = shrunk(move, spread, rank, self.basis.get(i))
            elif self.rule == "dual" and matrix:
                spread = noise * math.sqrt(t)
                move, self.basis[i] = shrunk(self.total[i], spread, rank, self.basis.get(i))
                self.theta[i].copy_(self.first[i] - rate * move)
                continue
            self.theta[i].sub_(move, alpha=rate)
        for mean, p in zip(self.average, self.theta, strict=True):
            mean.lerp_(p, 1 - min(self.of["ema"], (1 + t) / (10 + t)))

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        """Return the test accuracy in percent."""
        right = (self.net(x).argmax(1) == y).float().mean()
        return 100 * float(right)

    @torch.no_grad()
    def result(self, x: Tensor, y: Tensor, x_test: Tensor, y_test: Tensor) -> float:
        """Train, and return the test accuracy in percent."""
        steps = EPOCHS * math.ceil(len(x) / BATCH)
        for t in range(1, steps + 1):
            rows = torch.nonzero(torch.rand(len(x)) < BATCH / len(x))[:, 0]
            self.step(t, steps, x[rows], y[rows])
        if self.of["ema"]:
            for p, mean in zip(self.theta, self.average, strict=True):
                p.copy_(mean)
        if self.of["show"]:
            self.show(steps, x_test, y_test)
        return self.accuracy(x_test, y_test)

    def show(self, steps: int, x: Tensor, y: Tensor) -> None:
        """Print what moved the first layer, and the accuracies after shrinking that in part."""
        deviation = self.of["lr"] * SIGMA * self.of["C"] / BATCH * math.sqrt(steps)
        moved = self.theta[0] - self.first[0]
        alone = deviation * math.sqrt(moved.numel())
        print(f"first layer moved by {moved.norm():.2f}; noise alone: {alone:.2f}")
        clean, last = shrunk(moved, deviation, 32, None)[0], self.theta[0].clone()
        for share in (0.25, 0.5, 0.75, 1.0):
            self.theta[0].copy_(self.first[0] + share * clean + (1 - share) * moved)
            print(f"  {share:.0%} shrunk: {self.accuracy(x, y):.2f}")
        self.theta[0].copy_(last)


def main() -> None:
    """Print the accuracy of each run that is asked for."""
    data = load_data("mnist", data_folder(None), torch.device("cpu"))
    splits = [(data.standardised(s.images).flatten(1), s.labels) for s in (data.train, data.test)]
    tensors = [tensor for split in splits for tensor in split]
    for text in sys.argv[1:]:
        settings = dict(part.split("=") for part in text.split(","))
        print(f"{text}  {Run(settings).result(*tensors):.2f}", flush=True)


if __name__ == "__main__":
    main()
