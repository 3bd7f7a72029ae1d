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
    """Replace an attribute for a ``with`` block, and restore it at its end, also after an error.

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
    """Return the products with weights in an attention or recurrent layer, as Linear layers.

    Args:
        module: any module.

    Returns:
        Linear layers by their name in the layer, such as "in_proj", whose weight and bias are the
        layer's own parameters. {} for other modules, for a layer with other parameters, and for one
        whose ``forward`` was replaced.

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
    """Return a Linear layer for gradients of a module that computes x @ weight + bias.

    Its weight is the module's own. As that is the transpose of a Linear layer's, the layer's inputs
    are the module's output gradients, and its output gradients are the module's inputs.

    Args:
        module: any module.

    Returns:
        A layer without bias; None for other modules than those of :data:`TRANSPOSED`.
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
    """Make transformers keep every mask in a ``with`` block, as it does when it is traced.

    Otherwise it looks at the values of masks, which vmap cannot. Nothing happens if transformers
    was not imported.
    """
    utilities: Any = sys.modules.get(MASKS)
    if not hasattr(utilities, "is_tracing"):
        yield
        return
    with replaced(utilities, "is_tracing", lambda *_, **__: True):
        yield
