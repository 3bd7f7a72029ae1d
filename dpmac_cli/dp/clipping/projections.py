"""Projections of attention and recurrent layers, as Linear layers whose uses are recorded.

These layers are products with a few weights and operations without any. Clipping needs only inputs
and output gradients of the products. torch's attention computes them by ``F.linear``; recurrent
layers do in :mod:`.recurrent`.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
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
    """Replace an attribute, and restore it at the end."""
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def _parts(module: nn.Module) -> Mapping[str, tuple[str, str]]:
    """Return the names of weight and bias of each projection; {} for other layers."""
    if type(module) is nn.MultiheadAttention:
        return {
            "in_proj": ("in_proj_weight", "in_proj_bias"),
            "out_proj": ("out_proj.weight", "out_proj.bias"),
        }
    if type(module) not in RECURRENT:
        return {}
    kinds = (kind + end for end in ends_of(module) for kind in ("ih", "hh"))
    return {kind: (f"weight_{kind}", f"bias_{kind}") for kind in kinds}


def projections(module: nn.Module) -> dict[str, nn.Linear]:
    """Return Linear layers with the weights of attention or a recurrent layer; {} for others.

    It has no other parameters, and nothing replaces its forward.
    """
    named, found = dict(module.named_parameters()), {}
    for name, (weight, bias) in _parts(module).items():
        if weight not in named:
            return {}
        rows, columns = named[weight].shape
        linear: Any = nn.Linear(columns, rows, device="meta")
        linear.weight, linear.bias = named.pop(weight), named.pop(bias, None)
        found[name] = linear
    return {} if named or "forward" in vars(module) else found


def transposed(module: nn.Module) -> nn.Linear | None:
    """Return the Linear layer whose weight is the transpose of a module's, if it is one.

    Its inputs are the module's output gradients, and its output gradients the module's inputs.
    """
    kind, weight = type(module), getattr(module, "weight", None)
    if (kind.__module__, kind.__name__) != TRANSPOSED or not isinstance(weight, nn.Parameter):
        return None
    linear = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
    linear.weight = weight
    return linear


@contextmanager
def masks_kept() -> Iterator[None]:
    """Make transformers keep every mask, as when it is traced, if it was imported."""
    utilities: Any = sys.modules.get(MASKS)
    traced = hasattr(utilities, "is_tracing")
    with replaced(utilities, "is_tracing", lambda *_, **__: True) if traced else nullcontext():
        yield
