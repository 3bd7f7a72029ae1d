"""Training state: everything that a checkpoint holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpmac_cli.dp.geometry import Spread
from dpmac_cli.dp.mechanism import Ellipsoid
from dpmac_cli.dp.moments import Moments
from dpmac_cli.errors import ModelError
from dpmac_cli.randomness.layers import LayerDraws
from dpmac_cli.randomness.noise import NoiseSource
from dpmac_cli.randomness.sampling import Sampler
from dpmac_cli.training.canaries import Canaries


@dataclass
class TrainState:
    """All state of a run in one value.

    Attributes:
        theta: the parameters, shape (d,); the model's tensors are views of it.
        moments: m and v of the private means.
        region: the ellipsoid that the next step clips to.
        spread: what the geometry remembers; None for a ball.
        step: t, steps taken.
        chunk: samples worked on at a time: the physical batch, halved when memory runs out.
        sampler: draws the batches; secret.
        noise: draws the noise; secret.
        average: of theta, which is scored and published; None where theta itself is.
        canaries: of an audit run; their coins are secret.
        layers: randomness of forward passes: augmented views, dropout. None where there is none.
    """

    theta: Tensor
    moments: Moments
    region: Ellipsoid
    spread: Spread | None
    step: int
    chunk: int
    sampler: Sampler
    noise: NoiseSource
    average: Tensor | None = None
    canaries: Canaries | None = None
    layers: LayerDraws | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. All of them are post-noise, but for the canaries' coins."""
        named = {
            "theta": self.theta,
            "m": self.moments.m,
            "v": self.moments.v,
            "noise_average": self.moments.noise,
            "centre": self.region.centre,
            "inverse": self.region.inverse,
            "factor": self.region.factor,
            "average": self.average,
        }
        if self.spread is not None:
            named |= {"s": self.spread.s, "psi": self.spread.psi}
        if self.canaries is not None:
            named |= self.canaries.tensors()
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def numbers(self) -> dict[str, Any]:
        """Everything else as JSON values. The generators' states are secret."""
        return {
            "step": self.step,
            "chunk": self.chunk,
            "kappa_star": self.spread.kappa_star if self.spread else 0.0,
            "sampler": self.sampler.state(),
            "noise": self.noise.state(),
            "canaries": self.canaries.state() if self.canaries else None,
            "layers": None if self.layers is None else self.layers.state(),
        }

    def restore(self, tensors: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
        """Take over a saved state, all but what only an exact repetition needs, in place.

        Raises:
            ModelError: it is of another model or optimizer.
        """
        mine = {name: tuple(t.shape) for name, t in self.tensors().items()}
        saved = {name: tuple(t.shape) for name, t in tensors.items()}
        if mine != saved:
            raise ModelError(
                f"The checkpoint is of another model or optimizer: {saved}, not {mine}."
            )
        for name, tensor in self.tensors().items():
            tensor.copy_(tensors[name])
        self._go_to(numbers)

    def join_in(self, numbers: Mapping[str, Any]) -> None:
        """Take over what every rank must know of another's numbers: no secret is among them."""
        self._go_to(numbers)
        self._divide_as(numbers)

    def _go_to(self, numbers: Mapping[str, Any]) -> None:
        self.step = numbers["step"]
        if self.spread is not None:
            self.spread.kappa_star = numbers["kappa_star"]

    def _divide_as(self, numbers: Mapping[str, Any]) -> None:
        self.chunk = numbers["chunk"]
        if self.layers is not None:
            self.layers.restore(numbers["layers"])

    def restore_generators(self, numbers: Mapping[str, Any]) -> None:
        """Go on with the saved draws and chunks: only ever on the very same computation."""
        self._divide_as(numbers)
        self.sampler.restore(numbers["sampler"])
        self.noise.restore(numbers["noise"])
        if self.canaries is not None:
            self.canaries.restore(numbers["canaries"])
