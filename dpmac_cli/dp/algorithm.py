"""Algorithm of a run: geometry, rule and hyperparameters, looked up by their names in the table."""

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpmac_cli.dp.geometry import GEOMETRIES, Ball, Geometry, Spread
from dpmac_cli.dp.mechanism import Ellipsoid, PrivateMean
from dpmac_cli.dp.optimizers import Hyperparameters, Optimizer
from dpmac_cli.dp.rules import RULES, Moments, Rule

#: Radius of a ball that clips nothing; a power of two, so scaling by it is exact.
NO_CLIPPING = 2.0**40


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One of the six optimizers, or a custom one, ready to train."""

    geometry: Geometry  # chooses the ellipsoid that the next step clips to
    rule: Rule  # updates theta with the private mean
    hyper: Hyperparameters  # hyperparameters of both
    keeps_moments: bool  # see Optimizer.moments
    tracks_noise: bool  # True if v is less the noise's share

    def start(self, theta: Tensor) -> tuple[Ellipsoid, Spread | None, Moments]:
        """Return the ellipsoid of step 1, the state of the geometry, and the moments."""
        kept = theta if self.keeps_moments else theta[:0]
        moments = Moments(
            self.hyper.beta1,
            self.hyper.beta2,
            m=torch.zeros_like(kept),
            v=torch.zeros_like(kept),
            tracks_noise=self.tracks_noise,
        )
        return *self.geometry.start(theta), moments


def build_algorithm(
    optimizer: Optimizer, hyper: Hyperparameters, *, private: bool = True, rule: Rule | None = None
) -> Algorithm:
    """Build an optimizer of the table.

    Without ``private``, nothing is clipped. A ``rule`` replaces the table's update rule. It is
    called with one block of theta and of the moments at a time, so it must be independent across
    coordinates.
    """
    return Algorithm(
        geometry=_with_settings(GEOMETRIES[optimizer.geometry], hyper)
        if private
        else Ball(NO_CLIPPING),
        rule=_with_settings(RULES[optimizer.rule], hyper) if rule is None else _Apart(rule),
        hyper=hyper,
        keeps_moments=optimizer.moments,
        tracks_noise="phi" in optimizer.extra and hyper.phi == "tracked",
    )


@dataclass(frozen=True)
class _Apart:
    """A user-supplied rule, which is given a private mean in memory of its own.

    The memory of a block is part of that of the whole sum, whose later blocks have no noise yet.
    """

    rule: Rule

    def __call__(self, theta: Tensor, eta: float, private: PrivateMean, moments: Moments) -> None:
        self.rule(theta, eta, replace(private, value=private.value.clone()), moments)


def _with_settings(made: Any, hyper: Hyperparameters) -> Any:
    """Return a function unchanged, or a dataclass with the hyperparameters of its fields."""
    if not is_dataclass(made):
        return made
    return made(**{field.name: getattr(hyper, field.name) for field in fields(made)})  # type: ignore[operator]
