"""The table: six names, each a geometry and a rule.

A ball of radius C is an ellipsoid with centre 0 and scale C, so every optimizer is
*how gradients are clipped* x *how the private mean moves theta*. This module holds names only,
so that the command line can read it without loading torch.
"""

from dataclasses import dataclass
from typing import Literal

GeometryName = Literal["ball", "adaclip", "macadam"]
RuleName = Literal["sgd", "adam", "adam_bc"]


@dataclass(frozen=True)
class Optimizer:
    """A row of the table.

    Attributes:
        geometry: the clipping region, see :mod:`dpmac_cli.dp.geometry`.
        rule: the update, see :mod:`dpmac_cli.dp.rules`.
        summary: one line for help and reports.
    """

    geometry: GeometryName
    rule: RuleName
    summary: str

    @property
    def settings(self) -> frozenset[str]:
        """The hyperparameters, by their names in the configuration, that have an effect."""
        names = self.settings_without_clipping | GEOMETRY_SETTINGS[self.geometry]
        if self.geometry != "ball" and self.rule == "adam_bc":
            names |= {"phi"}
        return frozenset(names)

    @property
    def settings_without_clipping(self) -> frozenset[str]:
        """The same in a run without privacy, which only has the rule."""
        return RULE_SETTINGS[self.rule] | {"lr"}


GEOMETRY_SETTINGS: dict[GeometryName, frozenset[str]] = {
    "ball": frozenset({"clip_norm"}),
    "adaclip": frozenset({"beta1", "beta2", "h1", "h2"}),
    "macadam": frozenset({"beta1", "h1", "h2", "kappa"}),
}
RULE_SETTINGS: dict[RuleName, frozenset[str]] = {
    "sgd": frozenset(),
    "adam": frozenset({"beta1", "beta2", "gamma"}),
    "adam_bc": frozenset({"beta1", "beta2", "gamma_prime"}),
}

OPTIMIZERS: dict[str, Optimizer] = {
    "dp-sgd": Optimizer("ball", "sgd", "fixed clipping norm, gradient descent"),
    "adaclip": Optimizer("adaclip", "sgd", "coordinate-wise clipping, gradient descent"),
    "dp-adam": Optimizer("ball", "adam", "fixed clipping norm, Adam"),
    "dp-adambc": Optimizer("ball", "adam_bc", "fixed clipping norm, Adam less the noise's bias"),
    "dp-macadam": Optimizer("macadam", "adam", "coordinate-wise clipping, Adam"),
    "dp-macadambc": Optimizer(
        "macadam", "adam_bc", "coordinate-wise clipping, Adam less the noise's bias"
    ),
}
