"""When does DP-MacAdam's scale adapt, and why does high noise break it? MNIST, the paper's network.

Trains every setting of one of the grids below, follows the post-noise shares of coordinates on h1
and h2, and appends a line of JSON each. Settings already in the file are left out, so a study may
take several sittings.

    python benchmarks/high_noise.py sigma docs/data/high_noise.jsonl.xz
"""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from sittings import Setting, main, product

from dpmac_cli.config.resolve import resolve
from dpmac_cli.dp.mechanism import ellipsoid
from dpmac_cli.runs.loop import Evaluated, fit
from dpmac_cli.runs.trainer import make_trainer
from dpmac_cli.training.state import TrainState

TRACE_EVERY = 25
SEEDS = (0, 1, 2)
BOUNDS = ((1e-10, 1e-6), (1e-8, 1e-6), (1e-7, 1e-6), (1e-9, 1e-8), (1e-9, 1e-7), (1e-9, 1e-4))


def sigma_grid() -> Iterable[Setting]:
    """Noise by kappa."""
    return product(
        optimizer=("dp-macadam",),
        seed=SEEDS,
        sigma=(0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
        kappa=("paper", "exact", "tracked"),
    )


def bounds_grid() -> Iterable[Setting]:
    """h1 and h2 around the paper's, at a noise that reproduces and at one that does not."""
    for (h1, h2), kappa, sigma in itertools.product(BOUNDS, ("paper", "tracked"), (0.5, 1.0)):
        yield {
            "optimizer": "dp-macadam",
            "seed": 0,
            "sigma": sigma,
            "kappa": kappa,
            "h1": h1,
            "h2": h2,
        }


def adaclip_grid() -> Iterable[Setting]:
    """AdaClip's learning rate, betas and start: s_0^2, by default sqrt(h1 h2)."""
    yield from product(
        optimizer=("adaclip",), seed=(0,), sigma=(0.5, 1.0), lr=(0.001, 0.01, 0.1, 0.3, 1.0, 3.0)
    )
    for beta1, beta2 in ((0.9, 0.9), (0.99, 0.99), (0.9, 0.999), (0.0, 0.9)):
        for lr in (0.1, 1.0):
            yield {
                "optimizer": "adaclip",
                "seed": 0,
                "sigma": 0.5,
                "lr": lr,
                "beta1": beta1,
                "beta2": beta2,
            }
    for start in (1e-9, 1e-6):
        for lr in (0.001, 0.1, 1.0):
            yield {"optimizer": "adaclip", "seed": 0, "sigma": 0.5, "lr": lr, "start": start}


def cycle_grid() -> Iterable[Setting]:
    """The first steps at a noise that fails, to be followed one by one."""
    return product(
        optimizer=("dp-macadam",),
        seed=(0,),
        sigma=(0.8,),
        kappa=("paper", "exact", "tracked"),
        steps=(400,),
    )


GRIDS = {"sigma": sigma_grid, "bounds": bounds_grid, "adaclip": adaclip_grid, "cycle": cycle_grid}


def measure(setting: Setting) -> dict[str, Any]:
    """Train one setting on MNIST: accuracies and trace."""
    settings = {name: value for name, value in setting.items() if name != "start"}
    config = resolve({"dataset": "mnist", **settings}).plan
    trainer = make_trainer(config, device=torch.device("cpu"))
    if "start" in setting:
        start_from(trainer.state, setting["start"])
    trace, accuracy = [], []
    every = 1 if "steps" in setting else TRACE_EVERY

    def wanted(step: int) -> bool:
        return step % every == 0 or step <= 5

    for event in fit(trainer, lambda: False, wanted):
        if isinstance(event, Evaluated):
            accuracy.append(event.result.accuracy)
        elif wanted(event.step):
            trace.append({"step": event.step, **trainer.public_values()})
    return {"accuracy": accuracy, "trace": trace}


def start_from(state: TrainState, variance: float) -> None:
    """Begin with the same s_0^2 in every coordinate."""
    assert state.spread is not None
    state.spread.s.fill_(variance)
    b = variance**0.25 * (variance**0.5 * state.theta.numel()) ** 0.5
    state.region = ellipsoid(state.region.centre, torch.full_like(state.theta, b))


if __name__ == "__main__":
    main(__doc__, GRIDS, measure)
