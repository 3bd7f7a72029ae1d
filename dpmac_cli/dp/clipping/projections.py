"""Projections of attention and recurrent layers, as Linear layers whose uses are recorded.

These layers are products with a few weights and operations without any. Clipping needs only inputs
and output gradients of the products. torch's attention computes them by ``F.linear``; recurrent
layers do in :mod:`.recurrent`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from dpmac_cli.dp.clipping.recurrent import RECURRENT, ends_of

#: Module of transformers that leaves out a mask that hides nothing: it asks ``mask.all()``, which
#: vmap refuses, unless it is traced.
MASKS = "transformers.masking_utils"
#: Module and name of the layer x @ weight + bias of transformers, as in GPT-2.
TRANSPOSED = ("transformers.pytorch_utils", "Conv1D")


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute, and restore it at the end of the block.

    Args:
        holder: object or module that has the attribute.
        name: name of the attribute.
        value: its value in the block.
    """
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _parts(module: nn.Module) -> Mapping[str, tuple[str, str]]:
    """Return the names of weight and bias of each projection by its name; {} for other layers."""
    if type(module) is nn.MultiheadAttention:
        return {
            "in_proj": ("in_proj_weight", "in_proj_bias"),
            "out_proj": ("out_proj.weight", "out_proj.bias"),
        }
    if type(module) not in RECURRENT:
        return {}
    parts = {}
    for end in ends_of(module):
        for name in (f"ih{end}", f"hh{end}"):
            parts[name] = (f"weight_{name}", f"bias_{name}")
    return parts


def projections(module: nn.Module) -> dict[str, nn.Linear]:
    """Return Linear layers with the weights of attention or a recurrent layer; {} for others.

    Such a layer has no other parameters, and nothing replaces its forward.

    Example:
        >>> for name, linear in projections(nn.MultiheadAttention(4, 2)).items():
        ...     print(name, tuple(linear.weight.shape))
        in_proj (12, 4)
        out_proj (4, 4)
    """
    parameters = dict(module.named_parameters())
    linear_layers = {}
    for name, (weight, bias) in _parts(module).items():
        if weight not in parameters:
            return {}
        rows, columns = parameters[weight].shape
        linear: Any = nn.Linear(columns, rows, device="meta")
        linear.weight = parameters.pop(weight)
        linear.bias = parameters.pop(bias, None)
        linear_layers[name] = linear
    if parameters or "forward" in vars(module):
        return {}
    return linear_layers


def transposed(module: nn.Module) -> nn.Linear | None:
    """Return the Linear layer whose weight is the transpose of a module's, if it is one.

    Its inputs are the module's output gradients, and its output gradients the module's inputs.

    Args:
        module: any module; those of :data:`TRANSPOSED` compute x @ weight + bias.
    """
    kind = type(module)
    weight = getattr(module, "weight", None)
    if (kind.__module__, kind.__name__) != TRANSPOSED or not isinstance(weight, nn.Parameter):
        return None
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = weight
    return linear


@contextmanager
def masks_kept() -> Iterator[None]:
    """Make transformers keep every mask, as when it is traced, if it was imported."""
    utilities: Any = sys.modules.get(MASKS)
    if not hasattr(utilities, "is_tracing"):
        yield
        return
    with replaced(utilities, "is_tracing", lambda *_, **__: True):
        yield
