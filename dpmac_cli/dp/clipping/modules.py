"""Layers of our own, whose per-sample gradients :mod:`dpmac_cli.dp.clipping.forms` knows."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from dpmac_cli.errors import ModelError

#: The least ||W - mean||^2 divided by: below it, standardising would blow rounding up.
LEAST_SQUARE = 1e-4


class StandardisedConv2d(nn.Conv2d):
    """A convolution by W-hat = gain (W - mean) / ||W - mean||, mean and norm per output.

    Weight standardisation with a learnt gain (Qiao et al. 2019, arXiv 1903.10520; in this form
    Brock et al. 2021, arXiv 2101.08692), which De et al. 2022 train privately with.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, **options: Any) -> None:
        super().__init__(inputs, outputs, kernel, **options)
        self.gain = nn.Parameter(torch.ones(outputs))

    def standardised(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """z / ||z|| for z = W - mean, row by row, shape (out, fan-in); and 1 / ||z||, (out, 1)."""
        flat = self.weight.flatten(1).to(dtype or self.weight.dtype)
        centred = flat - flat.mean(1, keepdim=True)
        square = centred.square().sum(1, keepdim=True)
        scale = square.clamp(min=LEAST_SQUARE).rsqrt()
        return centred * scale, scale

    def forward(self, x: Tensor) -> Tensor:
        """A convolution of x, shape (samples, in, height, width), by W-hat."""
        direction, _ = self.standardised()
        weight = (direction * self.gain.unsqueeze(1)).view_as(self.weight)
        return conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ConstantNorm(nn.Module):
    """A batch norm by constants: scale (x - mean) / sqrt(var + eps) + shift, channel by channel.

    Each sample is normalised by the statistics of public data, so that none depends on others.
    Parameters and buffers are those of a batch norm, ``norm``, under the same names. Raises
    ModelError, which calls the layer ``name``, if it keeps no statistics.
    """

    def __init__(self, norm: Any, name: str) -> None:
        super().__init__()
        if norm.running_mean is None:
            raise ModelError(
                f"The layer {name}, a batch norm without running statistics, mixes the samples of "
                f"every batch. Use nn.GroupNorm(groups, {norm.num_features}) instead, or have that "
                "done by --fix-norm."
            )
        self._parameters |= norm._parameters
        self._buffers |= norm._buffers
        self._non_persistent_buffers_set |= norm._non_persistent_buffers_set
        self.eps = float(norm.eps)

    def normalised(self, x: Tensor) -> Tensor:
        """Return (x - mean) / sqrt(var + eps), of shape (samples, channels, ...)."""
        mean, scale = self._constants(x)
        return (x - mean) * scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs for x, shape (samples, channels, ...)."""
        mean, scale = self._constants(x)
        weight, bias = (self._parameters[name] for name in ("weight", "bias"))
        if weight is None or bias is None:
            return (x - mean) * scale
        gain = scale * weight.view_as(mean)
        return torch.addcmul(bias.view_as(mean) - mean * gain, x, gain)

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and 1 / sqrt(var + eps), (channels, 1, ...), in the dtype of x."""
        shape = (-1, *[1] * (x.ndim - 2))
        mean, var = (self.get_buffer(f"running_{name}").to(x.dtype) for name in ("mean", "var"))
        return mean.view(shape), (var + self.eps).rsqrt().view(shape)


@dataclass(frozen=True)
class Standardisation:
    """The linear map from gradients by W-hat to those by a StandardisedConv2d's weight and gain.

    W-hat = gain z / ||z|| with z = W - mean, row by row.
    """

    direction: Tensor  # z / ||z||, (out, fan-in)
    scale: Tensor  # gain / ||z||, (out,)
    moves: Tensor  # 1, or 0 where ||z|| is treated as a constant, (out,)

    @staticmethod
    def of(conv: StandardisedConv2d, dtype: torch.dtype) -> "Standardisation":
        """Return the map at a convolution's weights, computed in float64 and rounded once."""
        direction, norms = conv.standardised(torch.float64)
        norms = norms.squeeze(1)  # 1 / ||z||
        moves = (norms.square() * LEAST_SQUARE < 1).to(dtype)
        return Standardisation(direction.to(dtype), (conv.gain * norms).to(dtype), moves)

    def __call__(self, by_kernel: Tensor) -> dict[str, Tensor]:
        """Map gradients by the kernel, (samples, out, in, height, width), which are overwritten."""
        g = by_kernel.flatten(2)
        along = (g * self.direction).sum(2, keepdim=True)
        g.addcmul_(self.direction, along * self.moves.unsqueeze(1), value=-1)
        g.sub_(g.mean(2, keepdim=True)).mul_(self.scale.unsqueeze(1))
        return {"weight": g, "gain": along}
