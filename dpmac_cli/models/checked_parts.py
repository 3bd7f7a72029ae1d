"""Checks of the layers, parameters and buffers of a network, without running it."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.weight_norm import WeightNorm

from dpmac_cli.errors import ModelError

# Layers that compute statistics over the batch, so that one sample changes another's output.
MIXING_LAYERS = (nn.modules.batchnorm._BatchNorm,)
#: Why at least 32 bits are needed.
ROUNDING = (
    "With fewer than 32 bits, rounding changes the clipped sum by more than the noise allows for."
)


def check_parts(model: nn.Module, frozen: bool) -> None:
    """Reject a network with layers that mix samples, or tensors that cannot be trained or saved.

    Args:
        model: the network, which is not run.
        frozen: whether all but the last layer run in evaluation mode and are not trained, so that
            batch norm is a constant and tensors may have fewer than 32 bits.

    Raises:
        ModelError: names the layer or tensor, and what to do.
    """
    for name, module in model.named_modules():
        _check_layer(name, module, frozen)
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        _check_tensor(name, value, frozen)


def _check_layer(name: str, module: nn.Module, frozen: bool) -> None:
    """Reject a layer that mixes samples, or whose gradients depend on the batch.

    Args:
        name: name of the layer in the network.
        module: the layer.
        frozen: whether it is run in evaluation mode, in which batch norm is a constant.

    Raises:
        ModelError: names the layer, and the one to use instead.
    """
    if isinstance(module, MIXING_LAYERS) and not frozen and not _is_constant(module):
        raise ModelError(
            f"The layer {name} is a {type(module).__name__}, which mixes the samples of a "
            "batch and keeps statistics of them without noise. Use "
            "nn.GroupNorm(groups, channels) instead, or add {fix_norm=True} to replace it."
        )
    if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
        raise ModelError(
            f"The layer {name} has torch.nn.utils.weight_norm, which replaces its weight in every "
            "forward pass. Use torch.nn.utils.parametrizations.weight_norm(layer) instead."
        )
    bounded = getattr(module, "max_norm", None) is not None
    if bounded or getattr(module, "scale_grad_by_freq", False):
        raise ModelError(
            f"The layer {name} changes its weights or gradients depending on the batch. "
            "Leave out max_norm and scale_grad_by_freq."
        )


def _is_constant(norm: Any) -> bool:
    """Return whether a batch norm is in evaluation mode, in which its statistics are constants."""
    return not norm.training and norm.running_mean is not None and not is_lazy(norm.running_mean)


def computed_tensor(model: nn.Module) -> str:
    """Return the name of an attribute that autograd has computed; "" if there is none.

    Such a tensor, as ``self.scaled = 2 * self.weight`` in ``__init__``, keeps values of the first
    weights, and a gradient would go through a graph that is used once.

    Args:
        model: the network. Its layers' plain attributes are looked at, not parameters or buffers.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return f"{name}.{key}".lstrip(".")
    return ""


def _check_tensor(name: str, value: Tensor, frozen: bool) -> None:
    """Reject a parameter or buffer that cannot be trained or published.

    Args:
        name: name of the tensor in the network.
        value: the tensor.
        frozen: whether it is not trained, so that it may have fewer than 32 bits.

    Raises:
        ModelError: names the tensor, and what to do.
    """
    if is_lazy(value):
        raise ModelError(
            f"The shape of {name} is unknown until the network is used. Specify the layer's "
            "sizes, or call the network once on zeros in its factory."
        )
    if value.is_inference():
        raise ModelError(
            f"{name} was created in torch.inference_mode, so it cannot be trained. Create the "
            "network outside of it."
        )
    exact = value.is_floating_point() and value.itemsize >= 4
    if value.requires_grad and not exact and not frozen:
        raise ModelError(
            f"The parameter {name} is {value.dtype}. {ROUNDING} Add this line "
            "to the network's factory, or before make_private: network.float()"
        )
    if value.requires_grad and _hooks_of(value):
        raise ModelError(
            f"The parameter {name} has a hook, which would have no effect: gradients of a "
            "batch are never computed. Remove it. To train a part of a tensor, split it into "
            "two parameters, and freeze one with requires_grad_(False)."
        )
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        raise ModelError(f"{name} is a sparse, quantized or meta tensor. Use a dense tensor.")
    if value.is_floating_point() and not bool(value.double().isfinite().all()):
        raise ModelError(f"{name} contains NaN or infinity. Initialise it with finite numbers.")


def _hooks_of(parameter: Tensor) -> bool:
    """Return whether a parameter has hooks on its gradient."""
    hooks = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
    return any(hooks)
