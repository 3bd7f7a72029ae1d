"""Self-attention as two Linear layers: what enters and leaves its projections."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dpmac_cli.dp.clipping.layer_rules import Use
from dpmac_cli.dp.clipping.layers import Layer
from dpmac_cli.dp.clipping.matmul import matmul

#: What a call may be given by name, with the values that leave attention as it is.
PLAIN = {"attn_mask": None, "key_padding_mask": None, "is_causal": False}
#: What it may be given whatever the value: whether weights are returned, and how.
FREE = {"need_weights", "average_attn_weights"}
#: The parameters that the rule computes gradients by.
KNOWN = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}


def projections(layer: Layer, uses: Sequence[Use]) -> list[tuple[Layer, list[Use]]] | None:
    """Return the input and the output projection of self-attention as layers with uses.

    Attention is computed again, for all rows at once, to find the gradients by queries, keys and
    values. A projection without a trainable parameter is left out.

    Returns:
        None where the layer is no nn.MultiheadAttention, or its calls are not plain self-attention.
    """
    module: Any = layer.module
    if (
        type(module) is not nn.MultiheadAttention
        or not layer.parameters.keys() <= KNOWN
        or module._forward_hooks
        or not all(_is_self_attention(module, use) for use in uses)
    ):
        return None
    inner, outer = zip(*(_by_projection(module, use) for use in uses), strict=True)
    width, begin = module.embed_dim, layer.start
    found = []
    for prefix, outputs, of in (("in_proj_", 3 * width, inner), ("out_proj.", width, outer)):
        held = {
            name.removeprefix(prefix): p
            for name, p in layer.parameters.items()
            if name.startswith(prefix)
        }
        stop = begin + sum(p.numel() for p in held.values())
        if held:
            shapes = nn.Linear(width, outputs, device="meta")
            found.append((Layer(f"{layer.name}.{prefix}", shapes, held, begin, stop), list(of)))
        begin = stop
    return found


def _is_self_attention(module: Any, use: Use) -> bool:
    """Return whether a use is self-attention whose output for a sample is its first tensor."""
    named = {name: value for name, value in use.call.named.items() if name not in FREE}
    read = {(x.data_ptr(), x.shape, x.stride()) for x in use.inputs}
    return (
        len(read) == 1
        and use.call.output == 0
        and use.call.positional == (Tensor,) * 3
        and all(name in PLAIN and value == PLAIN[name] for name, value in named.items())
        and use.inputs[0].ndim == 3
        and module.batch_first
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and (module.dropout == 0 or not module.training)
    )


def _by_projection(module: Any, use: Use) -> tuple[Use, Use]:
    """Return what the input projection and the output projection read, and gradients by outputs."""
    x, delta = use.inputs[0], use.delta
    rows, positions, width = x.shape
    projected = matmul(x.reshape(-1, width), module.in_proj_weight.T)
    if module.in_proj_bias is not None:
        projected += module.in_proj_bias
    by_context = matmul(delta.reshape(-1, width), module.out_proj.weight)
    with torch.enable_grad():
        projected = projected.view(rows, positions, -1).requires_grad_()
        heads = projected.view(rows, positions, 3, module.num_heads, -1).permute(2, 0, 3, 1, 4)
        queries, keys, values = heads.unbind(0)
        context = scaled_dot_product_attention(queries, keys, values)
        context = context.transpose(1, 2).reshape(rows, positions, width)
        [by_projected] = torch.autograd.grad(context, projected, by_context.view_as(context))
    return Use((x,), by_projected), Use((context.detach(),), delta)
