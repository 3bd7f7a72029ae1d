"""Training state: everything that is saved in a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dpmac_cli.dp.geometry import Spread
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.rules import Moments
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.keystream import Keys
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import Noise
from dpmac_cli.randomness.sampling import Sampler


@dataclass(frozen=True, kw_only=True)
class Randomness:
    """Random draws of a run, all of them functions of a key and the step.

    Ranks other than the first have only the key of ``layers``, and neither sampler nor noise.
    """

    keys: Keys
    sampler: Sampler | None
    noise: Noise | None
    layers: LayerDraws | None = None  # augmented views and dropout, if there are any
    scores: Noise | None = None  # noise of covered scores


@dataclass(kw_only=True)
class TrainState:
    """Complete state of a run."""

    theta: Tensor  # parameters, shape (d,); the model's tensors are views of it
    moments: Moments  # m and v of the private means
    region: Ellipsoid  # clipping region of the next step
    spread: Spread | None  # state of the geometry; None for a ball
    chunk: int  # samples processed at a time: the physical batch, halved when memory runs out
    keys: Keys  # secret; with the step, they determine all further draws
    step: int = 0  # t, steps taken
    average: Tensor | None = None  # published average of theta; None if theta is published
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # from hooks: coins of canaries

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name. All except those of hooks are post-noise."""
        named = {
            "theta": self.theta,
            "m": self.moments.m,
            "v": self.moments.v,
            "centre": self.region.centre,
            "inverse": self.region.inverse,
            "factor": self.region.factor,
            "average": self.average,
            "s": None if self.spread is None else self.spread.s,
            **self.extra,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def numbers(self) -> dict[str, Any]:
        """Return everything else as JSON values. The keys are secret."""
        return {
            "step": self.step,
            "chunk": self.chunk,
            "kappa_star": self.spread.kappa_star if self.spread else 0.0,
            "keys": self.keys.as_json(),
        }

    def restore(
        self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any], *, exactly: bool
    ) -> None:
        """Copy a saved state, from the methods of the same names, into this one.

        If the next steps repeat those of the saved run ``exactly``, they use the saved keys,
        otherwise new ones.

        Raises:
            ModelError: the saved state belongs to another model or optimizer.
            ValueError: the keys of this state contradict ``exactly``.
        """
        mine = {name: tuple(t.shape) for name, t in self.tensors().items()}
        saved = {name: tuple(t.shape) for name, t in tensors.items()}
        if mine != saved:
            raise ModelError(
                f"The checkpoint belongs to another model or optimizer: {saved}, not {mine}."
            )
        if exactly != (Keys.of_json(numbers["keys"]) == self.keys):
            raise ValueError("an exact resume needs the saved keys; any other one needs new keys")
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self.go_to({**numbers, "chunk": numbers["chunk"] if exactly else self.chunk})

    def go_to(self, numbers: Mapping[str, Any]) -> None:
        """Set the step and the other numbers that every rank must agree on."""
        self.step, self.chunk = numbers["step"], numbers["chunk"]
        if self.spread is not None:
            self.spread.kappa_star = numbers["kappa_star"]
