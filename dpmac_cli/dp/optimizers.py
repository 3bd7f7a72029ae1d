"""Table of optimizers: each is a geometry and a rule, with settings and default learning rates.

A ball of radius C is an ellipsoid with centre 0 and scale C, so every optimizer combines a clipping
geometry with a rule that updates theta from the private mean. This module does not import torch;
:mod:`dpmac_cli.dp.algorithm` looks the names up.
"""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

Kappa = Literal["paper", "exact", "tracked"]

#: Settings that have an effect, for each geometry and each rule.
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
    """Hyperparameters of an optimizer, in the paper's notation."""

    lr: float  # eta
    clip_norm: float  # C
    beta1: float  # of Adam, like beta2 and gamma
    beta2: float
    gamma: float
    gamma_prime: float  # lower bound of AdamBC
    h1: float  # bounds of the estimated variance
    h2: float
    kappa: Kappa  # how MacAdam estimates the variance
    phi: str  # how AdamBC estimates the noise


@dataclass(frozen=True)
class Optimizer:
    """Entry of the table of optimizers."""

    geometry: str  # clipping region, a key of dpmac_cli.dp.geometry.GEOMETRIES
    rule: str  # update rule, a key of dpmac_cli.dp.rules.RULES
    summary: str  # one line for help and reports
    _: KW_ONLY
    lr: float = 1e-3  # default learning rate
    lr_on: Mapping[str, float] = field(default_factory=dict)  # by dataset name
    moments: bool = True  # whether the rule updates m and v, which then have the size of theta
    extra: frozenset[str] = frozenset()  # settings of this combination only

    @property
    def settings(self) -> frozenset[str]:
        """Return the configuration names of the hyperparameters that have an effect."""
        return self.settings_without_clipping | GEOMETRY_SETTINGS[self.geometry] | self.extra

    @property
    def settings_without_clipping(self) -> frozenset[str]:
        """Return the settings that have an effect without privacy, where only the rule is used."""
        return RULE_SETTINGS[self.rule] | {"lr"}


#: Learning rates are from the DP-MacAdam paper, and tuned for digits.
OPTIMIZERS: Mapping[str, Optimizer] = {
    "dp-sgd": Optimizer(
        "ball",
        "sgd",
        "fixed clipping norm, gradient descent",
        lr=0.1,
        lr_on={"digits": 0.5},
        moments=False,
    ),
    "adaclip": Optimizer(
        "adaclip",
        "sgd",
        "coordinate-wise clipping, gradient descent",
        lr_on={"digits": 0.5},
        moments=False,
    ),
    "dp-adam": Optimizer("ball", "adam", "fixed clipping norm, Adam", lr_on={"digits": 0.005}),
    "dp-adambc": Optimizer("ball", "adam_bc", "fixed clipping norm, Adam corrected for noise bias"),
    "dp-macadam": Optimizer(
        "macadam", "adam", "coordinate-wise clipping, Adam", lr_on={"digits": 0.005}
    ),
    "dp-macadambc": Optimizer(
        "macadam",
        "adam_bc",
        "coordinate-wise clipping, Adam corrected for noise bias",
        lr_on={"digits": 0.0005},
        extra=frozenset({"phi"}),
    ),
}
