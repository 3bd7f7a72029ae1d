"""Unfolded inputs of a layer: patches of a convolution, and their inner products.

A convolution has one, two or three dimensions of space. Its padding may have any mode.

With the patch a_it of sample i at position t, a convolution is the Linear layer W a_it, whose
per-sample gradient is sum_t delta_it a_it^T. In shapes, T is the number of positions, K the number
of numbers of a patch, and O the number of outputs.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad
from torch.nn.functional import pad

#: Gradients of kernels by the number of dimensions.
_BY_KERNEL: Mapping[int, Any] = {
    1: grad.conv1d_weight,
    2: grad.conv2d_weight,
    3: grad.conv3d_weight,
}


def _padded(conv: Any, a: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a convolution's inputs, and the zeros that it pads them with on both sides."""
    if conv.padding_mode == "zeros" and not isinstance(conv.padding, str):
        return a, conv.padding
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return pad(a, conv._reversed_padding_repeated_twice, mode), (0,) * len(conv.kernel_size)


def _with_zeros(conv: Any, a: Tensor) -> Tensor:
    """Return a convolution's inputs with all of their padding."""
    a, zeros = _padded(conv, a)
    if not any(zeros):
        return a
    return pad(a, _both_sides(zeros))


def _both_sides(zeros: Sequence[int]) -> list[int]:
    """Return numbers of zeros as torch's ``pad`` takes them, the last dimension first."""
    sides = []
    for number in reversed(zeros):
        sides += [number, number]
    return sides


def inputs_by_position(module: Any, a: Tensor, views: int = 1) -> Tensor:
    """Return the inputs of a Linear layer or convolution at each position, (samples, T, K).

    The positions of a sample's views are concatenated.

    Args:
        module: the layer.
        a: its inputs, shape (samples * views, ...).
        views: number of rows per sample.

    Example:
        >>> conv = nn.Conv1d(1, 1, kernel_size=2)
        >>> inputs_by_position(conv, torch.arange(4.0).view(1, 1, 4))
        tensor([[[0., 1.],
                 [1., 2.],
                 [2., 3.]]])
    """
    samples = len(a) // views
    if isinstance(module, nn.Linear):
        return a.reshape(samples, -1, module.in_features)
    patches = _unfolded(module, _with_zeros(module, a))
    by_view = torch.unflatten(patches, 0, (samples, views))  # (samples, views, channels, ...)
    dims = len(module.kernel_size)
    places = range(3, 3 + dims)
    taps = range(3 + dims, 3 + 2 * dims)
    by_tap = by_view.permute(0, 2, *taps, 1, *places)  # (samples, channels, taps, views, places)
    patch_size = module.weight[0].numel()
    return by_tap.reshape(samples, patch_size, -1).mT


def _unfolded(conv: Any, padded: Tensor) -> Tensor:
    """Return the pixels that each tap of a kernel reads at each position.

    Args:
        conv: the convolution.
        padded: its inputs, with their padding, shape (rows, channels, ...).

    Returns:
        The inputs with positions instead of pixels, and one more dimension for each of the kernel.
    """
    patches = padded
    sizes = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
    for dim, (size, step, gap) in enumerate(sizes, start=2):
        patches = patches.unfold(dim, gap * (size - 1) + 1, step)[..., ::gap]
    return patches


def gradients_by_position(module: Any, grad_output: Tensor, views: int = 1) -> Tensor:
    """Return gradients w.r.t. a layer's outputs at each position, (samples, T, O).

    Args:
        module: a Linear layer or convolution.
        grad_output: gradients w.r.t. its outputs, shape (samples * views, ...).
        views: number of rows per sample.
    """
    samples = len(grad_output) // views
    if isinstance(module, nn.Linear):
        return grad_output.reshape(samples, -1, module.out_features)
    by_view = grad_output.reshape(samples, views, len(module.weight), -1)
    return by_view.transpose(1, 2).reshape(samples, len(module.weight), -1).mT


def kernel_gradient(
    conv: Any, a: Tensor, grad_output: Tensor, shape: Sequence[int], groups: int = 1
) -> Tensor:
    """Return the gradient w.r.t. a kernel, summed over rows and positions.

    Args:
        conv: the convolution.
        a: its inputs, shape (rows, channels, ...).
        grad_output: gradients w.r.t. its outputs, shape (rows, O, ...).
        shape: shape of the kernel.
        groups: number of groups of channels.
    """
    a, zeros = _padded(conv, a)
    by_kernel = _BY_KERNEL[len(conv.kernel_size)]
    gradient: Tensor = by_kernel(
        a,
        shape,
        grad_output,
        conv.stride,
        zeros,
        conv.dilation,
        groups,
    )
    return gradient


def gram_by_position(conv: Any, a: Tensor) -> Tensor:
    """Return inner products of the patches of any two positions, float64, (rows, T, T).

    They are sums over the kernel's taps of products of two pixels. Each pair of pixels is
    multiplied once, not once per tap.

    Args:
        conv: a convolution with one group.
        a: its inputs, shape (rows, channels, ...).
    """
    a, zeros = _padded(conv, a)
    dims = len(conv.kernel_size)
    pixels = a.double().flatten(2)
    pairs = (pixels.mT @ pixels).view(len(a), *a.shape[2:], *a.shape[2:])
    pairs = pad(pairs, _both_sides(zeros) * 2)
    taps_by_axis = [_taps(conv, axis, pairs.shape[1 + axis]) for axis in range(dims)]
    first, *others = (pairs[:, *tap, *tap] for tap in product(*taps_by_axis))
    out = first.clone()
    for products in others:
        out += products
    return out.flatten(1 + dims).flatten(1, dims)


def _taps(conv: Any, axis: int, size: int) -> list[slice]:
    """Return the padded pixels that each tap of a kernel reads along an axis, one per output.

    Args:
        conv: the convolution.
        axis: dimension of space, from 0.
        size: number of pixels along it, with the padding.
    """
    kernel = conv.kernel_size[axis]
    stride = conv.stride[axis]
    dilation = conv.dilation[axis]
    reach = size - dilation * (kernel - 1)
    return [slice(tap, tap + reach, stride) for tap in range(0, dilation * kernel, dilation)]
