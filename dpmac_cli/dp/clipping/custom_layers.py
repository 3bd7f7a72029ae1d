"""Custom layers that have rules for their per-sample gradients.

They are layers of the built-in networks, and the replacement of a batch norm. The rules are in
:mod:`dpmac_cli.dp.clipping.layer_rules`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from dpmac_cli.errors import ModelError

#: Lower bound on the divisor ||W - mean||^2; below it, standardising would amplify rounding errors.
LEAST_SQUARE = 1e-4


class StandardisedConv2d(nn.Conv2d):
    """Convolution with W-hat = gain (W - mean) / ||W - mean||, mean and norm per output.

    Weight standardisation with a learnt gain (Qiao et al. 2019, arXiv 1903.10520; in this form
    Brock et al. 2021, arXiv 2101.08692), as used for private training by De et al. 2022.

    Args:
        inputs: number of channels of the input.
        outputs: number of channels of the output.
        kernel: size of the kernel.
        options: those of ``torch.nn.Conv2d``, such as ``stride``.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, **options: Any) -> None:
        super().__init__(inputs, outputs, kernel, **options)
        self.gain = nn.Parameter(torch.ones(outputs))

    def standardised(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return the direction and the scale of each output's weights, before the gain.

        Args:
            dtype: type to compute in; None for that of the weights.

        Returns:
            z / ||z|| for z = W - mean, shape (out, fan-in), and 1 / ||z||, shape (out, 1).
        """
        flat = self.weight.flatten(1).to(dtype or self.weight.dtype)
        centred = flat - flat.mean(1, keepdim=True)
        square = centred.square().sum(1, keepdim=True)
        scale = square.clamp(min=LEAST_SQUARE).rsqrt()
        return centred * scale, scale

    def forward(self, x: Tensor) -> Tensor:
        """Return the convolution of the inputs with W-hat, shape (samples, out, height, width).

        Args:
            x: inputs, shape (samples, in, height, width).
        """
        direction, _ = self.standardised()
        weight = (direction * self.gain.unsqueeze(1)).view_as(self.weight)
        return conv2d(
            x,
            weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


class Lookups(nn.Embedding):
    """Embedding of several columns of categories in one table: each column has rows of its own.

    Row ``column * places + value`` is the vector of a value of a column. All begin at zero.

    Args:
        columns: number of columns.
        places: number of values of each column.
        width: number of numbers of a vector.

    Example:
        >>> lookups = Lookups(columns=2, places=5, width=3)
        >>> lookups.rows(torch.tensor([[0.0, 4.0]]))  # the second column begins at row 5
        tensor([[0, 9]])
    """

    def __init__(self, columns: int, places: int, width: int) -> None:
        super().__init__(columns * places, width)
        self.columns, self.places = columns, places

    def rows(self, places: Tensor) -> Tensor:
        """Return the rows of the table that hold the vectors of some values.

        Args:
            places: value of each column, a whole number from 0 in any dtype, shape
                (samples, columns). NaN counts as value 0, and a number outside of the range as the
                nearest value.

        Returns:
            Numbers of rows, int64, shape (samples, columns).
        """
        first_rows = torch.arange(self.columns, device=places.device) * self.places
        values = places.nan_to_num(0.0).clamp(0, self.places - 1).long()
        return values + first_rows

    def reset_parameters(self) -> None:
        """Set all vectors to zero; called when the layer is created."""
        nn.init.zeros_(self.weight)


class LinearWithPlaces(nn.Module):
    """Linear layer on numbers and categories; a category is the number of its value, its place.

    It computes what a linear layer does whose inputs have a 1 at the place of each category and 0
    elsewhere, but looks up the columns of its weight.

    Args:
        inputs: number of inputs: numbers first, then places.
        columns: number of places among them. If all inputs are places, the linear part has one
            input, which is 0.
        places: number of values of each.
        outputs: number of outputs.
    """

    def __init__(self, inputs: int, columns: int, places: int, outputs: int) -> None:
        super().__init__()
        self.columns = columns
        self.numbers = nn.Linear(max(1, inputs - columns), outputs)
        self.lookups = Lookups(columns, places, outputs)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of both parts of the layer.

        Args:
            x: inputs, shape (samples, inputs).

        Returns:
            Numbers, shape (samples, max(1, inputs - columns)); and rows of the lookups, int64,
            shape (samples, columns).
        """
        numbers = x[:, : -self.columns]
        places = x[:, -self.columns :]
        if not numbers.shape[1]:
            numbers = torch.zeros_like(x[:, :1])
        return numbers, self.lookups.rows(places)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, shape (samples, outputs).

        Args:
            x: inputs, numbers first and then places, shape (samples, inputs).
        """
        numbers, rows = self.split(x)
        return joined(self.numbers(numbers), self.lookups(rows))


def joined(outputs: Tensor, vectors: Tensor) -> Tensor:
    """Return the outputs of a :class:`LinearWithPlaces` from those of its two parts.

    Args:
        outputs: outputs of its linear part, shape (samples, outputs).
        vectors: vectors of its places, shape (samples, columns, outputs), which are added up.
    """
    return outputs + vectors.sum(1)


class ConstantNorm(nn.Module):
    """Batch norm with constants: scale (x - mean) / sqrt(var + eps) + shift per channel.

    Each sample is normalised with statistics of public data, so no sample depends on others.

    Args:
        norm: a batch norm, whose parameters and buffers this module has, under the same names.
        name: name of the layer, for messages.

    Raises:
        ModelError: ``norm`` has no running statistics.
    """

    def __init__(self, norm: Any, name: str) -> None:
        super().__init__()
        if norm.running_mean is None:
            raise ModelError(
                f"The layer {name}, a batch norm without running statistics, mixes the samples of "
                f"every batch. Use nn.GroupNorm(groups, {norm.num_features}) instead, or add "
                "{fix_norm=True} to replace it."
            )
        self._parameters |= norm._parameters
        self._buffers |= norm._buffers
        self._non_persistent_buffers_set |= norm._non_persistent_buffers_set
        self.eps = float(norm.eps)

    def normalised(self, x: Tensor) -> Tensor:
        """Return (x - mean) / sqrt(var + eps), without scale and shift, in the shape of x.

        Args:
            x: inputs, shape (samples, channels, ...).
        """
        mean, scale = self._constants(x)
        return (x - mean) * scale

    def forward(self, x: Tensor) -> Tensor:
        """Return scale (x - mean) / sqrt(var + eps) + shift, in the shape of x.

        Args:
            x: inputs, shape (samples, channels, ...).
        """
        mean, scale = self._constants(x)
        weight = self._parameters["weight"]
        bias = self._parameters["bias"]
        if weight is None or bias is None:
            return (x - mean) * scale
        gain = scale * weight.view_as(mean)
        shift = bias.view_as(mean) - mean * gain
        return torch.addcmul(shift, x, gain)

    def _constants(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and 1 / sqrt(var + eps), (channels, 1, ...), in the dtype of x."""
        shape = (-1, *[1] * (x.ndim - 2))
        mean = self.get_buffer("running_mean").to(x.dtype)
        var = self.get_buffer("running_var").to(x.dtype)
        scale = (var + self.eps).rsqrt()
        return mean.view(shape), scale.view(shape)


@dataclass(frozen=True)
class Standardisation:
    """Linear map from gradients w.r.t. W-hat to those w.r.t. a StandardisedConv2d's parameters.

    W-hat = gain z / ||z|| with z = W - mean, row by row. With u = z / ||z|| and the gradient g
    w.r.t. W-hat, that w.r.t. gain is <g, u>, and that w.r.t. W is gain / ||z|| times g - <g, u> u,
    less its mean.

    Attributes:
        direction: z / ||z||, shape (out, fan-in).
        scale: gain / ||z||, shape (out,).
        moves: 1, or 0 where ||z|| is treated as a constant, shape (out,).
    """

    direction: Tensor
    scale: Tensor
    moves: Tensor

    @staticmethod
    def of(conv: StandardisedConv2d, dtype: torch.dtype) -> "Standardisation":
        """Return the map at a convolution's weights, computed in float64 and rounded once.

        Args:
            conv: the convolution.
            dtype: type of the gradients.
        """
        direction, norms = conv.standardised(torch.float64)
        norms = norms.squeeze(1)  # 1 / ||z||
        scale = conv.gain * norms
        moves = norms.square() * LEAST_SQUARE < 1
        return Standardisation(direction.to(dtype), scale.to(dtype), moves.to(dtype))

    def __call__(self, by_kernel: Tensor) -> dict[str, Tensor]:
        """Return per-sample gradients w.r.t. weight and gain, from those w.r.t. W-hat.

        Args:
            by_kernel: gradients w.r.t. W-hat, shape (samples, out, in, height, width). Overwritten.

        Returns:
            "weight", shape (samples, out, fan-in), in the memory of ``by_kernel``; and "gain",
            shape (samples, out, 1).
        """
        g = by_kernel.flatten(2)
        along = (g * self.direction).sum(2, keepdim=True)
        g.addcmul_(self.direction, along * self.moves.unsqueeze(1), value=-1)
        g.sub_(g.mean(2, keepdim=True)).mul_(self.scale.unsqueeze(1))
        return {"weight": g, "gain": along}
