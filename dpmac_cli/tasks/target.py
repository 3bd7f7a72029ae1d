"""A number to predict, in its public range.

A target y is clipped to the range [low, high], transformed, and scaled to t in [-1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from dpmac_cli.libraries import np
from dpmac_cli.tasks.task import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dpmac_cli.tasks.task import Outputs

#: Transforms of a target, with their inverses; see :class:`Target`.
Transform = Literal["none", "log1p"]


@dataclass(frozen=True)
class Target:
    """A number to predict.

    Attributes:
        low, high: public range that targets are clipped to; low < high.
        transform: "log1p" predicts log(1 + y), for targets above -1 of very different sizes.
    """

    name: str
    low: float
    high: float
    transform: Transform = "none"

    @property
    def width(self) -> float:
        """Largest error of a prediction, on the scale of the target."""
        return self.high - self.low

    @property
    def range(self) -> str:
        """Return the range and the transform in words."""
        return f"{self.low:g} to {self.high:g}" + " (log1p)" * (self.transform == "log1p")

    @property
    def ends(self) -> Interval:
        """Ends of the range, transformed."""
        if self.transform == "log1p":
            return math.log1p(self.low), math.log1p(self.high)
        return self.low, self.high

    @property
    def facts(self) -> dict[str, Any]:
        """Return the facts of the target in a model file."""
        return {"kind": "regression", **asdict(self)}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the target with these :attr:`facts`."""
        return cls(facts["name"], facts["low"], facts["high"], facts["transform"])

    def code(self, output: str) -> str:
        """Return a Python expression for the predicted numbers of an output."""
        low, high = self.ends
        code = f"{low!r} + ({output}.clamp(-1, 1) + 1) / 2 * {high - low!r}"
        return f"({code}).expm1()" if self.transform == "log1p" else code

    def scaled(self, targets: NDArray[Any]) -> NDArray[np.float32]:
        """Return targets scaled to [-1, 1]."""
        clipped = np.clip(targets.astype(np.float64), self.low, self.high)
        low, high = self.ends
        moved = np.log1p(clipped) if self.transform == "log1p" else clipped
        return (2 * (moved - low) / (high - low) - 1).clip(-1, 1).astype(np.float32)

    def in_units(self, scaled: Outputs) -> NDArray[np.float64]:
        """Return numbers on the scale of the target, in its range."""
        low, high = self.ends
        with np.errstate(over="ignore"):  # an output may be far beyond the range
            moved = low + (scaled.astype(np.float64) + 1) / 2 * (high - low)
            found = np.expm1(moved) if self.transform == "log1p" else moved
        return found.clip(self.low, self.high)
