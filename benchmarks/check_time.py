"""Time the check that a network is still the one that was validated, and its share of a step.

python benchmarks/check_time.py            # the built-in MLP, and a ViT of 12 layers
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpmac_cli import resolve
from dpmac_cli.dp.precision import Arithmetic, full_float32
from dpmac_cli.runs.trainer import Trainer, make_trainer

SETTINGS = Arithmetic.now()
COMMON = {"sigma": 1, "steps": 1000, "device": "cpu", "batch_size": 256}


class ViT(nn.Module):
    """Vision transformer of 12 layers on 28 x 28 images, in 7 x 7 patches."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.places = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, shape (samples, classes)."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: Tensor = self.head(self.layers(tokens).mean(1))
        return logits


def trainer_of(name: str, batch: int) -> Trainer:
    """Return a trainer of the MLP, or of the ViT on enlarged images of digits."""
    plan = resolve({**COMMON, "batch_size": batch}, dataset="digits").plan
    if name == "mlp":
        return make_trainer(plan)
    up = nn.Upsample((28, 28))
    return make_trainer(plan, model=nn.Sequential(up, ViT()))


def microseconds(call: Callable[[], object], times: int, rounds: int = 7) -> float:
    """Return the median time of a call."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(times):
            call()
        found.append((time.perf_counter() - began) / times * 1e6)
    return statistics.median(found)


def enter_and_leave() -> None:
    """Switch to full float32 and back, as every step does."""
    with full_float32(SETTINGS):
        pass


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller batches")
    options = parser.parse_args()
    print("| network | step, ms | two checks, us | share | precision, us |")
    print("|---|---|---|---|---|")
    for name, batch in (("mlp", 256), ("vit", 32 if options.quick else 128)):
        trainer = trainer_of(name, batch)
        trainer.step()
        step = microseconds(trainer.step, 10 if name == "mlp" else 1)
        checks = 2 * microseconds(trainer.sums.unchanged.check, 100)
        precision = microseconds(enter_and_leave, 100)
        print(
            f"| {name}, B = {batch} | {step / 1e3:.1f} | {checks:.0f} | {checks / step:.2%} "
            f"| {precision:.0f} |"
        )


if __name__ == "__main__":
    main()
