"""Table of optimizers: each is a geometry and a rule, with settings and default learning rates.

A ball of radius C is an ellipsoid with centre 0 and scale C, so every optimizer is
*how gradients are clipped* x *how the private mean moves theta*. This module loads no torch;
:mod:`dpmac_cli.dp.algorithm` looks the names up.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

Kappa = Literal["paper", "exact", "tracked"]

#: Settings of each geometry and each rule that have an effect.
GEOMETRY_SETTINGS: Mapping[str, frozenset[str]] = {
    "ball": frozenset({"clip_norm"}),
    "adaclip": frozenset({"beta1", "beta2", "h1", "h2"}),
    "macadam": frozenset({"beta1", "h1", "h2", "kappa"}),
}
RULE_SETTINGS: Mapping[str, frozenset[str]] = {
    "sgd": frozenset(),
    "adam": frozenset({"beta1", "beta2", "gamma"}),
    "adam_bc": frozenset({"beta1", "beta2", "gamma_prime"}),
}


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Numbers of an optimizer, in the paper's symbols."""

    lr: float  # eta
    clip_norm: float  # C
    beta1: float  # Adam's, as are beta2 and gamma
    beta2: float
    gamma: float
    gamma_prime: float  # the floor of AdamBC
    h1: float  # bounds of the estimated variance
    h2: float
    kappa: Kappa  # how MacAdam estimates the variance
    phi: str  # how AdamBC estimates the noise


@dataclass(frozen=True)
class Optimizer:
    """A row of the table."""

    geometry: str  # the clipping region, a name of dpmac_cli.dp.geometry.GEOMETRIES
    rule: str  # the update, a name of dpmac_cli.dp.rules.RULES
    summary: str  # one line for help and reports
    _: KW_ONLY
    lr: float = 1e-3  # default learning rate
    lr_on: Mapping[str, float] = field(default_factory=dict)  # by name of a dataset
    extra: frozenset[str] = frozenset()  # settings that only this combination has

    @property
    def settings(self) -> frozenset[str]:
        """The hyperparameters, by their names in the configuration, that have an effect."""
        return self.settings_without_clipping | GEOMETRY_SETTINGS[self.geometry] | self.extra

    def rate_on(self, dataset: str) -> float:
        """Return the default learning rate on a dataset."""
        return self.lr_on.get(dataset, self.lr)

    @property
    def settings_without_clipping(self) -> frozenset[str]:
        """Those that have an effect in a run without privacy, which only has the rule."""
        return RULE_SETTINGS[self.rule] | {"lr"}


#: Learning rates are those of the DP-MacAdam paper, and tuned ones for digits.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "dp-sgd": Optimizer(
        "ball", "sgd", "fixed clipping norm, gradient descent", lr=0.1, lr_on={"digits": 0.5}
    ),
    "adaclip": Optimizer(
        "adaclip", "sgd", "coordinate-wise clipping, gradient descent", lr_on={"digits": 0.5}
    ),
    "dp-adam": Optimizer("ball", "adam", "fixed clipping norm, Adam", lr_on={"digits": 0.005}),
    "dp-adambc": Optimizer("ball", "adam_bc", "fixed clipping norm, Adam less the noise's bias"),
    "dp-macadam": Optimizer(
        "macadam", "adam", "coordinate-wise clipping, Adam", lr_on={"digits": 0.005}
    ),
    "dp-macadambc": Optimizer(
        "macadam",
        "adam_bc",
        "coordinate-wise clipping, Adam less the noise's bias",
        lr_on={"digits": 0.0005},
        extra=frozenset({"phi"}),
    ),
}
