"""Unfolded inputs of a layer: patches of a convolution, their norms and inner products."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import conv2d, pad
from torch.nn.grad import conv2d_weight


def inputs_by_position(module: Any, a: Tensor, views: int = 1) -> Tensor:
    """Return the inputs of a Linear layer or convolution at each position, (samples, T, K).

    The positions of a sample's views are concatenated.
    """
    samples = len(a) // views
    if isinstance(module, nn.Linear):
        return a.reshape(samples, -1, module.in_features)
    (to_y, to_x), (dy, dx), (height, width) = module.stride, module.dilation, module.kernel_size
    below, beside = module.padding
    image = pad(a, (beside, beside, below, below)) if below or beside else a
    rows = image.unfold(2, dy * (height - 1) + 1, to_y)[..., ::dy]
    patches = rows.unfold(3, dx * (width - 1) + 1, to_x)[..., ::dx]
    by_view = torch.unflatten(patches, 0, (samples, views)).permute(0, 2, 5, 6, 1, 3, 4)
    return by_view.reshape(samples, a.shape[1] * height * width, -1).mT


def gradients_by_position(module: Any, delta: Tensor, views: int = 1) -> Tensor:
    """Return gradients w.r.t. a layer's outputs, (samples, T, O)."""
    samples = len(delta) // views
    if isinstance(module, nn.Linear):
        return delta.reshape(samples, -1, module.out_features)
    by_view = delta.reshape(samples, views, len(module.weight), -1)
    return by_view.transpose(1, 2).reshape(samples, len(module.weight), -1).mT


def kernel_gradient(
    conv: Any, a: Tensor, delta: Tensor, shape: Sequence[int], groups: int = 1
) -> Tensor:
    """Return the gradient w.r.t. a kernel of a given shape, summed over rows and positions."""
    options = (conv.stride, conv.padding, conv.dilation, groups)
    gradient: Tensor = conv2d_weight(a, shape, delta, *options)  # type: ignore[no-untyped-call]
    return gradient


def squares_by_position(module: Any, a: Tensor) -> Tensor:
    """Return squared norms of the inputs, float64, (rows, T)."""
    if isinstance(module, nn.Linear):
        rows = inputs_by_position(module, a)
        norms: Tensor = vector_norm(rows, dim=2, dtype=torch.float64)
        return norms.square_()
    pixels = vector_norm(a, dim=1, keepdim=True, dtype=torch.float64)
    return _over_kernel(module, pixels.square_())


def means_by_position(conv: Any, a: Tensor) -> Tensor:
    """Return means of patches, float64, (rows, T)."""
    sums = _over_kernel(conv, a.sum(1, keepdim=True, dtype=torch.float64))
    return sums / len(conv.weight[0].flatten())


def gram_by_position(conv: Any, a: Tensor) -> Tensor:
    """Return inner products of the patches of any two positions, float64, (rows, T, T).

    They are sums over the kernel's taps of products of two pixels. Each pair of pixels is
    multiplied once, not once per tap.
    """
    flat = a.double().flatten(2)
    below, beside = conv.padding
    pairs = (flat.mT @ flat).view(len(a), *a.shape[2:], *a.shape[2:])
    pairs = pad(pairs, (beside, beside, below, below) * 2)
    ys, xs = (_taps(conv, axis, size) for axis, size in enumerate(pairs.shape[1:3]))
    first, *others = (pairs[:, y, x, y, x] for y in ys for x in xs)
    out = first.clone()
    for products in others:
        out += products
    return out.flatten(3).flatten(1, 2)


def _over_kernel(conv: Any, pixels: Tensor) -> Tensor:
    """Sum one number per pixel, (rows, 1, height, width), over each patch: (rows, T)."""
    ones = pixels.new_ones(1, 1, *conv.kernel_size)
    return conv2d(pixels, ones, None, conv.stride, conv.padding, conv.dilation).flatten(1)


def _taps(conv: Any, axis: int, size: int) -> list[slice]:
    """Return the padded pixels that each tap of a kernel reads along an axis, one per output."""
    kernel, stride, dilation = (of[axis] for of in (conv.kernel_size, conv.stride, conv.dilation))
    reach = size - dilation * (kernel - 1)
    return [slice(tap, tap + reach, stride) for tap in range(0, dilation * kernel, dilation)]
