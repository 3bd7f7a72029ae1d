"""Attack on rounding: copies of one record at a ReLU's kink, with one record more or less.

As a program, ``python -m tests.kinks THREADS KIND PHYSICAL SIZE SIZE`` prints the largest move.
"""

import sys
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpmac_cli import ArrayData, make_private

#: Number of records to try.
CANDIDATES = 50


class Corner(nn.Module):
    """The first channel at the lower edge, which sees the lower half of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1, 8, 4]


def network(kind: str) -> nn.Sequential:
    """A network whose first unit is computed by a layer of a kind."""
    torch.manual_seed(0)
    if kind == "convolution":
        first: list[nn.Module] = [nn.Conv2d(1, 8, 8, padding=4), Corner()]
    else:
        linear: nn.Module = nn.Linear(64, 1)
        if kind == "weight-norm":
            linear = nn.utils.parametrizations.weight_norm(linear)
        first = [linear, nn.Flatten()]
    flat: list[nn.Module] = [nn.Identity() if kind == "convolution" else nn.Flatten()]
    return nn.Sequential(*flat, *first, nn.ReLU(), nn.Linear(1, 10))


def at_kinks(first: Any, count: int) -> NDArray[np.uint8]:
    """Images of 8x8 pixels at which the first unit is 0 up to rounding: parts that cancel."""
    weight, bias = first.weight[0].detach().double().numpy().ravel(), first.bias[0].item()
    # The upper half of the kernel is on the lower half of the image.
    weight = weight[:32] if isinstance(first, nn.Conv2d) else weight
    half = len(weight) // 2
    rng = np.random.default_rng(0)
    one, other = (rng.integers(0, 256, (60_000, half), dtype=np.uint8) for _ in range(2))
    left = (one / 127.5 - 1) @ weight[:half] + bias
    right = (other / 127.5 - 1) @ weight[half:]
    order = np.argsort(right)
    near = order[np.searchsorted(right[order], -left).clip(0, len(right) - 1)]
    best = np.argsort(np.abs(left + right[near]))[:count]
    images = np.zeros((count, 64), np.uint8)
    images[:, 64 - 2 * half :] = np.concatenate([one[best], other[near[best]]], 1)
    return images.reshape(-1, 8, 8)


def largest_move(kind: str, physical: int, sizes: tuple[int, int]) -> float:
    """Return the largest distance between the sums of one number of copies and another."""
    copies = max(sizes)
    images = at_kinks(network(kind)[1], CANDIDATES)
    x, y = images.repeat(copies, 0), np.zeros(CANDIDATES * copies, int)
    data = ArrayData(x, y, images[:4], np.arange(4), classes=[str(n) for n in range(10)])
    options: dict[str, Any] = {"isolate": True} if kind == "isolated" else {}
    private = make_private(
        network(kind),
        data=data,
        optimizer="dp-sgd",
        sigma=1,
        clip_norm=1.0,
        batch_size=8,
        epochs=1,
        physical_batch=physical,
        delta=1e-5,
        standardise="half",
        **options,
    )
    trainer, moves = private._step, []
    for begin in range(0, len(x), copies):
        one, other = (
            trainer._clip_and_sum(np.arange(begin, begin + size)).double().clone() for size in sizes
        )
        moves.append(float((one - other).norm()))
    return max(moves)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    kind, physical, *sizes = sys.argv[2:]
    move = largest_move(kind, int(physical), (int(sizes[0]), int(sizes[1])))
    sys.stdout.write(f"{move}\n")
