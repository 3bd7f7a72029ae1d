"""Attention that calls its projections as Linear layers, so that their uses are recorded.

The rest is torch's own code and runs once, so dropout draws the same numbers as without recording.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention, softmax

ATTENTIONS = frozenset({nn.MultiheadAttention})
_ARGUMENTS = inspect.signature(nn.MultiheadAttention.forward)


def attention_weights(module: Any) -> dict[str, tuple[Tensor, Tensor | None]]:
    """Return weight and bias of attention's two projections."""
    outer = module.out_proj
    return {
        "in_proj": (module.in_proj_weight, module.in_proj_bias),
        "out_proj": (outer.weight, outer.bias),
    }


def is_known_attention(module: Any) -> bool:
    """Return whether a module is torch's attention with plain parameters."""
    return (
        module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and {name for name, _ in module.named_parameters()}
        <= {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    )


def is_plain_attention(module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
    """Return whether a call has a batch of queries, keys and values, and perhaps masks."""
    try:
        given = _given(module, inputs, named)
    except TypeError:
        return False
    batches = [given[name] for name in ("query", "key", "value")]
    masks = [given[name] for name in ("attn_mask", "key_padding_mask")]
    return all(isinstance(x, Tensor) and x.ndim == 3 for x in batches) and all(
        mask is None or isinstance(mask, Tensor) for mask in masks
    )


def attend(
    module: Any, calls: Mapping[str, nn.Module], *inputs: Any, **named: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the result of ``nn.MultiheadAttention.forward``."""
    given = _given(module, inputs, named)
    queries, keys, values = _projected(module, calls["in_proj"], given)
    p, mask, weights = module.dropout if module.training else 0.0, _mask_of(module, given), None
    if given["need_weights"]:
        scores = queries @ keys.mT / module.head_dim**0.5
        weights = dropout(softmax(scores if mask is None else scores + mask, -1), p)
        context = weights @ values
        if given["average_attn_weights"]:
            weights = weights.mean(1)
    else:
        context = scaled_dot_product_attention(queries, keys, values, mask, dropout_p=p)
    out: Tensor = calls["out_proj"](context.transpose(1, 2).flatten(2))
    return _samples_first(module, out), weights


def _samples_first(module: Any, x: Tensor) -> Tensor:
    """Exchange the first two dimensions if a module takes samples in the second one."""
    return x if module.batch_first else x.transpose(0, 1)


def _given(module: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name. Raises TypeError if they do not fit."""
    bound = _ARGUMENTS.bind(module, *inputs, **named)
    bound.apply_defaults()
    return bound.arguments


def _projected(module: Any, project: nn.Module, given: Mapping[str, Any]) -> list[Tensor]:
    """Return queries, keys and values, (samples, heads, positions, width of a head).

    Inputs that are the same tensor are projected once. Of the others, each has all projections,
    and two of the three are not used.
    """
    inputs = [given[name] for name in ("query", "key", "value")]
    projected = {id(x): project(_samples_first(module, x)) for x in inputs}
    return [
        projected[id(x)].chunk(3, 2)[part].unflatten(2, (module.num_heads, -1)).transpose(1, 2)
        for part, x in enumerate(inputs)
    ]


def _mask_of(module: Any, given: Mapping[str, Any]) -> Tensor | None:
    """Return what is added to the scores, (samples or 1, heads or 1, queries or 1, keys)."""
    attending, padding = given["attn_mask"], given["key_padding_mask"]
    found: Tensor | None = None
    if attending is not None:
        added = _added(attending, given["query"])
        by_head = added.ndim == 3
        found = (
            added.view(-1, module.num_heads, *added.shape[-2:]) if by_head else added[None, None]
        )
    if padding is not None:
        padded = _added(padding, given["query"])[:, None, None]
        found = padded if found is None else found + padded
    return found


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """Return a mask as numbers to add: minus infinity where it is True."""
    if mask.is_floating_point():
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -torch.inf)
