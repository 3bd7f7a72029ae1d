"""Is clamping after correction steadier than clamping before? An ablation of DP-MacAdam, MNIST.

"after" is Algorithm 1: average u_t, correct, subtract the noise, clamp (lines 16 to 19). "before"
is AdaClip's order in DP-MacAdam's place: subtract the noise from u_t, clamp, average, correct. Both
are followed step by step: how far the scale b moves from one step to the next, root mean square of
log(b_t / b_{t-1}) over the coordinates, and how its norm does.

    python benchmarks/clamp_order.py docs/data/clamp_order.jsonl
"""

import argparse
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sittings import Setting, carry_on, product, results

from dpmac_cli.config.plan import TrainPlan
from dpmac_cli.config.resolve import resolve
from dpmac_cli.dp.geometry import MacAdam, Spread, _scaled
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.dp.moments import Moments
from dpmac_cli.optim.dp_macadam import DPMacAdam
from dpmac_cli.runs.trainer import Trainer, make_trainer
from dpmac_cli.training.evaluation import evaluate

#: Steps at the start that are left out: the scale has yet to settle; and when its norm is read.
SETTLING, LOOK = 100, 300


@dataclass(frozen=True)
class ClampBefore(MacAdam):
    """DP-MacAdam with AdaClip's order."""

    def begin(self, step: int, spread: Spread | None) -> None:
        """An average of clamped variances is corrected like any average started at 0."""
        super().begin(step, spread)
        assert spread is not None
        spread.kappa = 1 - self.beta1**step

    def next(
        self, private: PrivateMean, moments: Moments, region: Ellipsoid, spread: Spread | None
    ) -> Ellipsoid:
        """Clamp, then average, then correct."""
        assert spread is not None
        assert spread.kappa is not None
        m_hat = moments.m_hat(self.beta1, out=region.centre)
        variance = private.without_noise((private.value - m_hat).square_())
        spread.s.lerp_(variance.clamp_(self.h1, self.h2), 1 - self.beta1)
        return _scaled(region, (spread.s / spread.kappa).clamp_(self.h1, self.h2))


def build(setting: Setting) -> tuple[TrainPlan, Trainer]:
    """A trainer with one order or the other."""
    flags = {name: value for name, value in setting.items() if name != "order"}
    config = resolve({"dataset": "mnist", "optimizer": "dp-macadam", **flags}).plan
    trainer = make_trainer(config, device=torch.device("cpu"))
    if setting["order"] == "before":
        p = config.optimizer
        assert isinstance(p, DPMacAdam)
        trainer.geometry = ClampBefore(p.beta1, p.h1, p.h2, "paper")
    return config, trainer


def size(setting: Setting) -> float:
    """The norm of b after some steps."""
    _, trainer = build(setting)
    for _ in range(LOOK):
        trainer.step()
    return float(trainer.state.region.scale.norm())


def measure(setting: Setting) -> dict[str, Any]:
    """Train one setting: accuracy, and how steady b was."""
    config, trainer = build(setting)
    moves, norms = [], []
    before = trainer.state.region.scale
    for step in range(1, config.privacy.steps + 1):
        trainer.step()
        after = trainer.state.region.scale
        if step > SETTLING:
            moves.append(float((after / before).log_().square_().mean().sqrt()))
            norms.append(float(after.norm().log()))
        before = after
    swings = [abs(b - a) for a, b in pairwise(norms)]
    result = evaluate(trainer.model, trainer.data, trainer.data.test)
    return {"accuracy": result.accuracy, "move": fmean(moves), "swing": fmean(swings)}


def as_markdown(file: Path) -> str:
    """Means over the seeds, a line a noise and way."""
    lines = ["| sigma | clamped | accuracy | move of log b | swing of its norm |", "|---" * 5 + "|"]
    rows = results(file)
    for sigma, order, kappa in dict.fromkeys(
        (r["sigma"], r["order"], r.get("kappa", "")) for r in sorted(rows, key=lambda r: r["sigma"])
    ):
        alike = [
            r for r in rows if (r["sigma"], r["order"], r.get("kappa", "")) == (sigma, order, kappa)
        ]
        accuracies = ", ".join(f"{100 * r['accuracy']:.2f}" for r in alike)
        moves = (fmean(r[what] for r in alike) for what in ("move", "swing"))
        cells = [f"{sigma:g}", f"{order} {kappa}".strip(), accuracies, *(f"{m:.3f}" for m in moves)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run what is not there yet, and print a table of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--size", action="store_true", help="print the norm of b alone")
    options = parser.parse_args()
    noise, seeds = (0.5, 0.7, 1.0), (0, 1)
    if options.size:
        for setting in product(order=("before", "after"), sigma=noise, seed=(0,)):
            kappa = {"kappa": "tracked"} if setting["order"] == "after" else {}
            print(setting, f"{size({**setting, **kappa}):.3g}", flush=True)
        return
    settings = [
        *product(order=("before",), sigma=noise, seed=seeds),
        *product(order=("after",), kappa=("paper", "tracked"), sigma=noise, seed=seeds),
    ]
    carry_on(settings, measure, options.file)
    print(as_markdown(options.file))


if __name__ == "__main__":
    main()
