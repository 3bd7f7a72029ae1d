"""Algorithm of a run: a geometry and a rule with their numbers, looked up by the table's names."""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from dpmac_cli.dp.geometry import GEOMETRIES, Ball, Geometry, Spread
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.optimizers import RULE_SETTINGS, Hyperparameters, Optimizer
from dpmac_cli.dp.rules import RULES, Moments, Rule

#: The radius of a ball that clips nothing: a power of two, so scaling by it is exact.
NO_CLIPPING = 2.0**40


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One of the six optimizers, or another, ready to train."""

    geometry: Geometry  # chooses the ellipsoid that the next step clips to
    rule: Rule  # moves theta by the private mean
    hyper: Hyperparameters  # the numbers of both
    keeps_moments: bool  # True if the rule uses m and v, which are then as long as theta
    tracks_noise: bool  # True if the moments track the noise's variance

    def start(self, theta: Tensor) -> tuple[Ellipsoid, Spread | None, Moments]:
        """Return the ellipsoid of step 1, what the geometry remembers, and the moments."""
        kept = theta if self.keeps_moments else theta[:0]
        moments = Moments(
            self.hyper.beta1,
            self.hyper.beta2,
            m=torch.zeros_like(kept),
            v=torch.zeros_like(kept),
            noise=torch.zeros_like(theta) if self.tracks_noise else None,
        )
        return *self.geometry.start(theta), moments


def build_algorithm(
    optimizer: Optimizer, hyper: Hyperparameters, *, private: bool = True, rule: Rule | None = None
) -> Algorithm:
    """Build the algorithm of a row of the table.

    Not ``private``, it has a ball that clips nothing. A ``rule`` moves theta in place of the
    table's. It is given a block of theta, and of the moments, at a time, so it must treat each
    coordinate by itself.
    """
    return Algorithm(
        geometry=_with_settings(GEOMETRIES[optimizer.geometry], hyper)
        if private
        else Ball(NO_CLIPPING),
        rule=rule or _with_settings(RULES[optimizer.rule], hyper),
        hyper=hyper,
        keeps_moments="beta1" in RULE_SETTINGS[optimizer.rule],
        tracks_noise="phi" in optimizer.extra and hyper.phi == "tracked",
    )


def _with_settings(made: Any, hyper: Hyperparameters) -> Any:
    """Return a function as it is, and a dataclass made with the numbers that it has fields for."""
    if not is_dataclass(made):
        return made
    return made(**{field.name: getattr(hyper, field.name) for field in fields(made)})  # type: ignore[operator]
