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
    padded = pad(a, conv._reversed_padding_repeated_twice, mode)
    none = (0,) * len(conv.kernel_size)
    return padded, none


def _with_zeros(conv: Any, a: Tensor) -> Tensor:
    """Return a convolution's inputs with all of their padding."""
    padded, zeros = _padded(conv, a)
    if not any(zeros):
        return padded
    return pad(padded, _both_sides(zeros))


def _both_sides(zeros: Sequence[int]) -> list[int]:
    """Return numbers of zeros as torch's ``pad`` takes them, the last dimension first."""
    sides = []
    for number in reversed(zeros):
        sides += [number, number]
    return sides


def inputs_by_position(module: Any, a: Tensor, views: int = 1) -> Tensor:
    """Return a layer's inputs a_it at each of T positions, shape (samples, T, K).

    For a convolution they are patches, in the order (channels, *kernel size). The positions of a
    sample's rows follow one another.

    Args:
        module: a Linear layer, or a convolution with any padding.
        a: its inputs, shape (samples * views, ...).
        views: number of adjacent rows of ``a`` per sample.

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
    by_number = by_tap.reshape(samples, patch_size, -1)
    return by_number.mT


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
        windows = patches.unfold(dim, gap * (size - 1) + 1, step)
        patches = windows[..., ::gap]
    return patches


def gradients_by_position(module: Any, grad_output: Tensor, views: int = 1) -> Tensor:
    """Return gradients delta_it w.r.t. a layer's outputs at each of T positions, (samples, T, O).

    Positions are in the order of :func:`inputs_by_position`.

    Args:
        module: a Linear layer or convolution with O outputs.
        grad_output: gradients of the loss w.r.t. its outputs, shape (samples * views, ...).
        views: number of adjacent rows per sample.
    """
    samples = len(grad_output) // views
    if isinstance(module, nn.Linear):
        return grad_output.reshape(samples, -1, module.out_features)
    outputs = len(module.weight)
    by_view = grad_output.reshape(samples, views, outputs, -1)
    by_output = by_view.transpose(1, 2).reshape(samples, outputs, -1)
    return by_output.mT


def kernel_gradient(
    conv: Any, a: Tensor, grad_output: Tensor, shape: Sequence[int], groups: int = 1
) -> Tensor:
    """Return the gradient w.r.t. a convolution's kernel, summed over rows and positions.

    Args:
        conv: the convolution, of which padding, stride and dilation are used.
        a: its inputs, shape (rows, channels, ...).
        grad_output: gradients of the loss w.r.t. its outputs, shape (rows, O, ...).
        shape: shape of the kernel, (O, channels / groups, *kernel size), which is that of the
            result.
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
    """Return the inner product of a convolution's patches at any two of T positions.

    It is a sum over the kernel's taps of products of two pixels. Each pair of pixels is multiplied
    once, not once per tap.

    Args:
        conv: a convolution with one group.
        a: its inputs, shape (rows, channels, ...).

    Returns:
        Gram matrix of each row's patches, float64, shape (rows, T, T).

    Example:
        >>> conv = nn.Conv1d(1, 1, kernel_size=2)
        >>> gram_by_position(conv, torch.tensor([[[1.0, 2.0, 3.0]]]))  # patches (1, 2), (2, 3)
        tensor([[[ 5.,  8.],
                 [ 8., 13.]]], dtype=torch.float64)
    """
    a, zeros = _padded(conv, a)
    dims = len(conv.kernel_size)
    sides = a.shape[2:]
    pixels = a.double().flatten(2)
    products_of_pixels = pixels.mT @ pixels
    pairs = products_of_pixels.view(len(a), *sides, *sides)
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
