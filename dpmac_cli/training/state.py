"""Training state: everything that is saved in a checkpoint, all of it computed after noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpmac_cli.dp.geometry import Spread
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.moments import Moments
from dpmac_cli.errors import ModelError


@dataclass(kw_only=True)
class TrainState:
    """Complete state of a run after a step: a resumed run continues from it with new noise.

    Nothing in it depends on a record except through a private mean, so it may be published.
    """

    theta: Tensor  # parameters, shape (d,); the model's tensors are views of it
    moments: Moments  # m and v of the private means
    region: Ellipsoid  # clipping region of the next step
    spread: Spread | None  # state of the geometry; None for a ball
    chunk: int  # samples processed at a time: the physical batch, halved when memory runs out
    step: int = 0  # t, steps taken
    average: Tensor | None = None  # published average of theta; None if theta is published

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, all post-noise. They are the tensors themselves, not copies.

        ``theta``, ``m``, ``v`` and ``average`` have shape (d,), and those of the region
        (``centre``, ``inverse`` and ``factor``) and ``s`` of its spread too, unless it is a ball.
        Moments that the optimizer does not keep are empty. ``average`` and ``s`` are absent
        without.
        """
        named = {
            "theta": self.theta,
            "m": self.moments.m,
            "v": self.moments.v,
            "centre": self.region.centre,
            "inverse": self.region.inverse,
            "factor": self.region.factor,
        }
        if self.average is not None:
            named["average"] = self.average
        if self.spread is not None:
            named["s"] = self.spread.s
        return named

    def numbers(self) -> dict[str, Any]:
        """Return everything else as JSON values, all post-noise: "step" and "kappa_star".

        ``kappa_star`` is 0 for a ball.
        """
        # Not the chunk: it says when memory ran out, which depends on the size of a batch.
        return {"step": self.step, "kappa_star": self.spread.kappa_star if self.spread else 0.0}

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Copy a saved state, from the methods of the same names, into this one.

        Args:
            tensors: tensors by name, on any device.
            numbers: the other values.

        Raises:
            ModelError: it belongs to another model or optimizer. Nothing is changed then.
        """
        mine, saved = _shapes(self.tensors()), _shapes(tensors)
        if mine != saved:
            raise ModelError(
                f"The checkpoint belongs to another model or optimizer: {saved}, not {mine}."
            )
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self.go_to(numbers)

    def go_to(self, numbers: Mapping[str, Any]) -> None:
        """Set the step and the other numbers that every rank must agree on.

        Args:
            numbers: values of :meth:`numbers`.
        """
        self.step = numbers["step"]
        if self.spread is not None:
            self.spread.kappa_star = numbers["kappa_star"]


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors on the CPU, by name.

    Args:
        tensors: tensors by name, on any device.
    """
    return {name: t.detach().cpu().clone() for name, t in tensors.items()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors by name."""
    return {name: tuple(t.shape) for name, t in tensors.items()}
